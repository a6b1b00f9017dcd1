"""Which reach to a node: the best that works, tried in the order shm, ucx, grpc; the choice and the reasons are logged."""

import logging
from collections.abc import Callable, Sequence

from kvpool.client.grpc_reach import GrpcReach
from kvpool.errors import ConfigError, KvpoolError, UnavailableError
from kvpool.request.pool import NodeDescription
from kvpool.tier import ArenaMapping
from kvpool.transport import Reach, ShmReach, same_host
from kvpool.transport.ucx import UcxReach
from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.fence import NodeIdentity

log = logging.getLogger(__name__)

AUTO = "auto"
REACHES = ("shm", "ucx", "grpc")


def check_transport(transport: str) -> str:
    """`transport` if it is `auto` or a reach; `ConfigError` otherwise."""
    if transport != AUTO and transport not in REACHES:
        raise ConfigError(f"unknown transport {transport!r}; choose {AUTO}, {', '.join(REACHES)}")
    return transport


def open_reach(node: NodeDescription, address: str, transport: str, *, skip: Sequence[str] = (), security: Security = PLAIN) -> Reach:
    """The best working reach to `node`, whose control plane is at `address`. Blocks for at most a few seconds.

    `skip` names reaches that failed lately; under `auto` they are tried last. Raises `UnavailableError` saying why none works.
    """
    wanted = sorted(REACHES, key=lambda name: name in skip) if transport == AUTO else [transport]
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


def _shm(node: NodeDescription, address: str, security: Security) -> Reach:
    if node.shm is None:
        raise UnavailableError("not offered")
    if not same_host(node.shm):
        raise UnavailableError("another host")
    return ShmReach(ArenaMapping.open(node.shm.path, node.node_id, node.incarnation))


def _ucx(node: NodeDescription, address: str, security: Security) -> Reach:
    if node.ucx is None:
        raise UnavailableError("not offered")
    return UcxReach(node.ucx)


def _grpc(node: NodeDescription, address: str, security: Security) -> Reach:
    if not node.grpc_data:
        raise UnavailableError("not offered")
    return GrpcReach(address, NodeIdentity(node.node_id, node.incarnation), node.capacity_bytes, security)


_OPENERS: dict[str, Callable[[NodeDescription, str, Security], Reach]] = {"shm": _shm, "ucx": _ucx, "grpc": _grpc}
