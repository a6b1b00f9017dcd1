"""`python -m kvpool.node.tcp`: the TCP data plane of a node, until standard input or the node's session ends.

Started by `TcpPlane`, which reads the one line it prints (where it serves) and then its beats. To the node it is a client like any other on
its host: it maps the arena, and has a session, by which the node knows what it holds.
"""

import argparse
import contextlib
import logging
import os
import select
import signal
import ssl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from kvpool.errors import AccessError, KvpoolError
from kvpool.node.tcp_index import BoardIndex
from kvpool.security.principal import Right
from kvpool.security.tls import server_context
from kvpool.security.tokens import TokenTable
from kvpool.tier import ArenaMapping
from kvpool.tier.board import BoardReader, Cell
from kvpool.transport.tcp import Admit, Served, TcpServer
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.session_client import Session

log = logging.getLogger(__name__)

BEAT_S: Final = 1.0
_HOLDS, _TOUCHES = 32_768, 65_536
_SESSION_S: Final = 10.0


def main() -> None:
    """Serve; exit 0 when the node closes standard input, 1 when there is nothing to serve (any more; said on standard error)."""
    args = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="tcp data plane: %(message)s")
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)  # these reach a whole group at once; when this process ends, the node decides
    try:
        with _session(args) as (session, server):
            print(server.address, flush=True)
            ended = _beat(session)
    except (KvpoolError, OSError) as error:
        raise SystemExit(f"tcp data plane: {error}") from error
    if ended:
        raise SystemExit(f"tcp data plane: {ended}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvpool.node.tcp")
    for name in ("node-id", "arena", "session", "listen"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--incarnation", type=int, required=True)
    for name in ("tls-cert", "tls-key", "tls-ca", "tokens"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--mutual", action="store_true")
    return parser


@contextlib.contextmanager
def _session(args: argparse.Namespace) -> Iterator[tuple[Session, TcpServer]]:
    """Join the node and serve."""
    with contextlib.ExitStack() as stack:
        arena = stack.enter_context(ArenaMapping.open(args.arena, args.node_id, args.incarnation))
        cell = Cell.create(holds=_HOLDS, touches=_TOUCHES)
        stack.callback(cell.close)
        session = Session.open(args.session, NodeIdentity(args.node_id, args.incarnation), "tcp data plane", cell.fd, _SESSION_S)
        stack.callback(session.close)
        board = BoardReader(session.board_fd, cell, args.node_id, args.incarnation)
        served = Served(node_id=args.node_id, incarnation=args.incarnation, arena=arena.data, index=BoardIndex(board, cell))
        server = TcpServer(args.listen, served, tls=_tls(args), admit=_admit(args.tokens))
        stack.callback(server.close)
        yield session, server


def _tls(args: argparse.Namespace) -> Callable[[], ssl.SSLContext] | None:
    if args.tls_cert is None:
        return None
    return server_context(args.tls_cert, args.tls_key, args.tls_ca, mutual=args.mutual)


def _admit(tokens: Path | None) -> Admit:
    """Everybody where no tokens are asked for; otherwise who may map the whole arena."""
    table = None if tokens is None else TokenTable(tokens)

    def admit(token: str) -> None:
        if table is None:
            return
        who = table.principal(token)
        if not who.may(Right.MAP, Right.WORKER):
            raise AccessError(f"{who.name} may not read a whole node: that takes the right map or worker")

    return admit


def _beat(session: Session) -> str:
    """Until standard input ends: "". Why, if something else is over first."""
    while not select.select([sys.stdin], [], [], BEAT_S)[0]:
        if not session.alive:
            return "the node has ended the session"
        os.write(sys.stdout.fileno(), b".")
    return ""


if __name__ == "__main__":
    main()
