"""A process that owns an arena and does nothing else: the far side of reach tests and benches.

`ArenaOwner` starts `python -m kvpool.testing.arena_owner`, which creates the arena, serves it over UCX and TCP if asked to, prints one line
of JSON and ends with its standard input, so no owner survives the process that started it.
"""

import argparse
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvpool.block import BlockKey
from kvpool.errors import ConfigError, DeadlineError
from kvpool.node.tcp_index import BoardIndex
from kvpool.tier import DEFAULT_DIRECTORY, Arena, ArenaMapping
from kvpool.tier.board import Board, BoardReader, Cell
from kvpool.transport import ShmOffer, UcxOffer, host_boot_id
from kvpool.transport.tcp import Peer, Served, TcpServer
from kvpool.transport.ucx import UcxTarget
from kvpool.transport.ucx.process import decode_offer, encode_offer

_START_S = 180.0
_STOP_S = 10.0
_INCARNATION = 1


class ArenaOwner:
    """The started process, with this process's own mapping of its arena as `mapping`. Raises `DeadlineError` if it does not come up.

    `frames`: (offset, length) of what can be had by key over TCP; `frame_key` has the keys.
    """

    def __init__(
        self,
        capacity: int,
        *,
        ucx: bool = False,
        tcp: bool = False,
        frames: Sequence[tuple[int, int]] = (),
        directory: Path = DEFAULT_DIRECTORY,
    ) -> None:
        self.node_id = uuid.uuid4().hex
        self.incarnation = _INCARNATION
        command = [sys.executable, "-m", "kvpool.testing.arena_owner", self.node_id, str(capacity), str(directory)]
        command += [*(["--ucx"] if ucx else []), *(["--tcp"] if tcp else []), "--frames", json.dumps(list(frames))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self._process.pid
        try:
            said = self._first_line()
            self.shm = ShmOffer(path=said["path"], boot_id=host_boot_id())
            self.ucx = decode_offer(said["ucx"]) if ucx else None
            self.tcp = said["tcp"]
            self.mapping = self.map()
        except BaseException:
            self.kill()
            raise

    def map(self) -> ArenaMapping:
        """Another mapping of the arena, as another client would make it."""
        return ArenaMapping.open(self.shm.path, self.node_id, self.incarnation)

    def ucx_offer(self) -> UcxOffer:
        """Its offer. Raises `ConfigError` if it was started without UCX."""
        if self.ucx is None:
            raise ConfigError("this owner serves no UCX; start it with ucx=True")
        return self.ucx

    def tcp_peer(self) -> Peer:
        """Where it serves TCP. Raises `ConfigError` if it was started without."""
        if not self.tcp:
            raise ConfigError("this owner serves no TCP; start it with tcp=True")
        return Peer(address=self.tcp, node_id=self.node_id, incarnation=self.incarnation)

    @property
    def alive(self) -> bool:
        """Whether the process still runs (or hangs)."""
        return self._process.poll() is None

    def freeze(self) -> None:
        """SIGSTOP."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait for the end; twice is fine. Its arena file stays behind, as after any crash, until somebody reaps it."""
        self._process.kill()
        self._process.wait(_STOP_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def close(self) -> int:
        """Ask it to end, by closing its input; the exit code (that of the signal if it was killed). Twice is fine."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            return self._process.wait(_STOP_S)
        finally:
            self.kill()
            Path(self.shm.path).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _first_line(self) -> dict[str, str]:
        stream = self._process.stdout
        if stream is None or not select.select([stream], [], [], _START_S)[0]:
            raise DeadlineError(f"the arena owner said nothing within {_START_S:.0f} s")
        line = stream.readline()
        if not line:
            raise ConfigError("the arena owner ended before it was ready; see its messages above")
        said: dict[str, str] = json.loads(line)
        return said


def main() -> None:
    """Own an arena until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m kvpool.testing.arena_owner")
    parser.add_argument("node_id")
    parser.add_argument("capacity", type=int)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ucx", action="store_true")
    parser.add_argument("--tcp", action="store_true")
    parser.add_argument("--frames", type=json.loads, default=[])
    args = parser.parse_args()
    with Arena.create(args.directory, args.node_id, _INCARNATION, args.capacity) as arena:
        target = UcxTarget(arena.data) if args.ucx else None
        server = _tcp_server(arena, args.node_id, args.frames) if args.tcp else None
        said = {"path": str(arena.path), "ucx": encode_offer(target.offer) if target else "", "tcp": server.address if server else ""}
        print(json.dumps(said), flush=True)
        os.read(sys.stdin.fileno(), 1)
        for serving in (target, server):
            if serving is not None:
                serving.close()


def frame_key(offset: int, length: int) -> BlockKey:
    """The key of a frame at that place."""
    return BlockKey(hashlib.sha256(f"{offset} {length}".encode()).digest())


def _tcp_server(arena: Arena, node_id: str, frames: Sequence[tuple[int, int]]) -> TcpServer:
    """As the data plane of a node has it, with its frames on a board."""
    board, cell = Board.create(node_id, _INCARNATION, max_blocks=4096, capacity=arena.capacity), Cell.create()
    board.attach(cell.fd)
    for offset, length in frames:
        board.publish(frame_key(offset, length), offset, length)
    index = BoardIndex(BoardReader(board.read_fd, cell, node_id, _INCARNATION), cell)
    return TcpServer("127.0.0.1:0", Served(node_id=node_id, incarnation=_INCARNATION, arena=arena.data, index=index))


if __name__ == "__main__":
    main()
