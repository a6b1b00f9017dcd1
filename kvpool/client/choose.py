"""Which reach to a node: the best that works; the choice and the reasons are logged.

In this order: `shm`; `ucx` where it goes by RDMA, which takes a device here and is certain once a byte has been read; `tcp`; `ucx` however
it goes: over TCP it is slower than plain sockets; `grpc`.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from kvpool.client.grpc_reach import GrpcReach
from kvpool.client.local import LocalReach
from kvpool.errors import ConfigError, KvpoolError, UnavailableError
from kvpool.request.pool import NodeDescription
from kvpool.security.tls import client_context
from kvpool.tier import ArenaMapping
from kvpool.transport import Reach, same_host
from kvpool.transport.tcp import Peer, TcpReach
from kvpool.transport.ucx import UcxReach
from kvpool.transport.ucx.lane import is_one_sided
from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.fence import NodeIdentity

log = logging.getLogger(__name__)

AUTO = "auto"
REACHES = ("shm", "ucx", "tcp", "grpc")
_RDMA_DEVICES = Path("/sys/class/infiniband")


def check_transport(transport: str) -> str:
    """`transport` if it is `auto` or a reach; `ConfigError` otherwise."""
    if transport != AUTO and transport not in REACHES:
        raise ConfigError(f"unknown transport {transport!r}; choose {AUTO}, {', '.join(REACHES)}")
    return transport


def open_reach(node: NodeDescription, address: str, transport: str, *, skip: Sequence[str] = (), security: Security = PLAIN) -> Reach:
    """The best working reach to `node`, whose control plane is at `address`. Blocks for at most a few seconds.

    `skip` names reaches that failed lately; under `auto` they are tried last. Raises `UnavailableError` saying why none works.
    """
    attempts = [attempt for attempt in _ATTEMPTS if attempt[0] in REACHES] if transport == AUTO else [(transport, _OPENERS[transport])]
    reasons: dict[str, None] = {}
    for name, opener in sorted(attempts, key=lambda attempt: attempt[0] in skip):
        try:
            reach = opener(node, address, security)
        except KvpoolError as error:
            reasons[f"{name}: {error}"] = None
            continue
        log.info("node %s at %s: reach %s%s", node.node_id[:8], address, name, f" ({'; '.join(reasons)})" if reasons else "")
        return reach
    raise UnavailableError(f"no reach to node {node.node_id[:8]} at {address}: {'; '.join(reasons)}")


def _shm(node: NodeDescription, address: str, security: Security) -> Reach:
    if node.shm is None:
        raise UnavailableError("not offered")
    if not same_host(node.shm):
        raise UnavailableError("another host")
    return LocalReach(ArenaMapping.open(node.shm.path, node.node_id, node.incarnation))


def _ucx(node: NodeDescription, address: str, security: Security) -> Reach:
    if node.ucx is None:
        raise UnavailableError("not offered")
    return UcxReach(node.ucx)


def _rdma(node: NodeDescription, address: str, security: Security) -> Reach:
    if node.ucx is None:
        raise UnavailableError("not offered")
    if not _has_device():
        raise UnavailableError("no RDMA device here")
    reach = UcxReach(node.ucx)
    if not is_one_sided(reach.transports):
        reach.close()
        raise UnavailableError(f"not by RDMA, but over {', '.join(reach.transports) or 'something unknown'}")
    return reach


def _has_device() -> bool:
    try:
        return any(_RDMA_DEVICES.iterdir())
    except OSError:
        return False


def _tcp(node: NodeDescription, address: str, security: Security) -> Reach:
    if node.tcp is None:
        raise UnavailableError("not offered")
    security.metadata(node.tcp.address)  # refuses to send a token in the clear
    peer = Peer(
        address=node.tcp.address,
        node_id=node.node_id,
        incarnation=node.incarnation,
        tls=client_context(security.tls_ca, security.tls_cert, security.tls_key) if security.dials_tls else None,
        tls_name=security.tls_name,
        token=security.bearer() or "",
    )
    return TcpReach(peer)


def _grpc(node: NodeDescription, address: str, security: Security) -> Reach:
    if not node.grpc_data:
        raise UnavailableError("not offered")
    return GrpcReach(address, NodeIdentity(node.node_id, node.incarnation), node.capacity_bytes, security)


_Opener = Callable[[NodeDescription, str, Security], Reach]
_OPENERS: dict[str, _Opener] = {"shm": _shm, "ucx": _ucx, "tcp": _tcp, "grpc": _grpc}
_ATTEMPTS: tuple[tuple[str, _Opener], ...] = (("shm", _shm), ("ucx", _rdma), ("tcp", _tcp), ("ucx", _ucx), ("grpc", _grpc))
