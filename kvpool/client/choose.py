"""Which reach to a node: the best that works; the choice and the reasons are logged.

In this order: `shm`; `ucx` where this host has hardware for it (RDMA); `tcp`; `ucx` otherwise: over TCP it is slower than plain sockets;
`grpc`.
"""

import logging
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

from kvpool.client.grpc_reach import GrpcReach
from kvpool.client.local import LocalReach
from kvpool.errors import ConfigError, KvpoolError, UnavailableError
from kvpool.request.pool import NodeDescription
from kvpool.tier import ArenaMapping
from kvpool.transport import Reach, same_host
from kvpool.transport.tcp import Peer, TcpReach
from kvpool.transport.ucx import UcxReach
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
    wanted = sorted(_in_order(node), key=lambda name: name in skip) if transport == AUTO else [transport]
    reasons: list[str] = []
    for name in wanted:
        try:
            reach = _OPENERS[name](node, address, security)
        except KvpoolError as error:
            reasons.append(f"{name}: {error}")
            continue
        log.info("node %s at %s: reach %s%s", node.node_id[:8], address, name, f" ({'; '.join(reasons)})" if reasons else "")
        return reach
    raise UnavailableError(f"no reach to node {node.node_id[:8]} at {address}: {'; '.join(reasons)}")


def _in_order(node: NodeDescription) -> list[str]:
    """All reaches, the best first: without a device for RDMA here UCX would go over TCP, and then plain sockets do better."""
    if "tcp" not in REACHES or node.tcp is None or _has_rdma():
        return list(REACHES)
    return sorted(REACHES, key=lambda name: {"shm": 0, "tcp": 1, "ucx": 2, "grpc": 3}[name])


def _has_rdma() -> bool:
    try:
        return any(_RDMA_DEVICES.iterdir())
    except OSError:
        return False


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


def _tcp(node: NodeDescription, address: str, security: Security) -> Reach:
    if node.tcp is None:
        raise UnavailableError("not offered")
    security.metadata(node.tcp.address)  # refuses to send a token in the clear
    peer = Peer(
        address=node.tcp.address,
        node_id=node.node_id,
        incarnation=node.incarnation,
        tls=_tls_context(security),
        tls_name=security.tls_name,
        token=security.bearer() or "",
    )
    return TcpReach(peer)


def _tls_context(security: Security) -> ssl.SSLContext | None:
    """What connections of ours are opened with, None for none. Raises `ConfigError` for files that can't be read."""
    if not security.dials_tls:
        return None
    try:
        context = ssl.create_default_context(cafile=None if security.tls_ca is None else str(security.tls_ca))
        if security.tls_cert is not None:
            context.load_cert_chain(security.tls_cert, security.tls_key)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"the certificates can't be used: {error}") from error
    return context


def _grpc(node: NodeDescription, address: str, security: Security) -> Reach:
    if not node.grpc_data:
        raise UnavailableError("not offered")
    return GrpcReach(address, NodeIdentity(node.node_id, node.incarnation), node.capacity_bytes, security)


_OPENERS: dict[str, Callable[[NodeDescription, str, Security], Reach]] = {"shm": _shm, "ucx": _ucx, "tcp": _tcp, "grpc": _grpc}
