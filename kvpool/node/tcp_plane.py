"""The TCP data plane as its node sees it: a child process (`kvpool.node.tcp`) that is started again when it dies or falls silent.

Silence matters because of writers. A node keeps what a lost write lease covered out of use for `FENCE_NS`; the plane works on one write for
no longer than `MAX_DEADLINE_NS`; and when it stands still in between, it is killed before it can go on with bytes of long ago.
"""

import sys
from pathlib import Path
from typing import Final

from kvpool.request.pool import TcpOffer
from kvpool.transport.nurse import NursedProcess
from kvpool.wire.credentials import Security
from kvpool.wire.fence import NodeIdentity

_SILENCE_S: Final = 5.0


class TcpPlane(NursedProcess[TcpOffer]):
    """Serves the arena at `arena` of `node` at `listen` (host:port, port 0: any free one), joined to the node by its `session` socket.

    It has TLS where `security` has a certificate, and takes tokens of the table at `tokens` where that is given.
    Raises `ConfigError` when the first child can't serve (its reasons are on standard error).
    """

    def __init__(self, node: NodeIdentity, arena: Path, session: str, listen: str, security: Security, tokens: Path | None) -> None:
        command = [sys.executable, "-m", "kvpool.node.tcp", "--node-id", node.node_id, "--incarnation", str(node.incarnation)]
        command += ["--arena", str(arena.absolute()), "--session", session, "--listen", listen]
        if security.tls_cert is not None:
            command += ["--tls-cert", str(security.tls_cert), "--tls-key", str(security.tls_key)]
            command += [] if security.tls_ca is None else ["--tls-ca", str(security.tls_ca)]
            command += ["--mutual"] if security.mutual else []
        command += [] if tokens is None else ["--tokens", str(tokens)]
        super().__init__(command, _offer, name="TCP", hint="leave tcp out of the offers", silence_s=_SILENCE_S)


def _offer(line: bytes) -> TcpOffer:
    return TcpOffer(address=line.decode().strip())
