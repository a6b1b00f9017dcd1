"""One look at a cluster: what every member says about itself, asked all at once, each with its own time limit.

A member that doesn't answer is part of the picture, not an error: its report carries the reason instead of the numbers.
"""

import asyncio
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from kvpool.cli.credentials import security
from kvpool.cli.http import call
from kvpool.cluster import Member, Membership, open_membership
from kvpool.cluster.member import Identity
from kvpool.errors import KvpoolError, UnavailableError
from kvpool.policy.placement import node_from_info
from kvpool.request import WorkerStatus
from kvpool.request.pool import NodeDescription
from kvpool.wire.pool_client import PoolRpc
from kvpool.wire.worker_client import WorkerClient

ASK_TIMEOUT_S = 3.0
MAX_ASKED_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """A pool node: its place in the cluster, and its books, or why there are none."""

    member: Member
    state: str
    description: NodeDescription | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """A worker: its status, or why there is none."""

    member: Member
    status: WorkerStatus | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterReport:
    """A router: its URL, and what /health said, or why it said nothing."""

    member: Member
    url: str
    health: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everybody, in the order of the membership."""

    nodes: tuple[NodeReport, ...]
    workers: tuple[WorkerReport, ...]
    routers: tuple[RouterReport, ...]

    @property
    def complete(self) -> bool:
        """True when everybody answered."""
        reports: list[NodeReport | WorkerReport | RouterReport] = [*self.nodes, *self.workers, *self.routers]
        return not any(report.error for report in reports)


def open_cluster(url: str) -> Membership:
    """The membership of a cluster that must be reachable now. Raises `UnavailableError`, `ConfigError`."""
    membership = open_membership(url)
    if not membership.connected:
        membership.close()
        raise UnavailableError("the cluster's membership server can't be reached; is the cluster running? (`kvpool up`, or --cluster URL)")
    return membership


async def take_snapshot(
    members: tuple[Member, ...], timeout_s: float = ASK_TIMEOUT_S, *, quarantined: Collection[Identity] = ()
) -> Snapshot:
    """Ask all `members`, at most `timeout_s` each. `quarantined`: those of them that the others can't reach."""
    gate = asyncio.Semaphore(MAX_ASKED_AT_ONCE)

    async def gated(report: Any) -> Any:
        async with gate:
            return await report

    of = {role: [member for member in members if member.role in roles] for role, roles in _ASKED.items()}
    nodes, workers, routers = await asyncio.gather(
        asyncio.gather(*(gated(_ask_node(member, member_state(member, quarantined), timeout_s)) for member in of["node"])),
        asyncio.gather(*(gated(_ask_worker(member, timeout_s)) for member in of["worker"])),
        asyncio.gather(*(gated(_ask_router(member, timeout_s)) for member in of["router"])),
    )
    return Snapshot(nodes=tuple(nodes), workers=tuple(workers), routers=tuple(routers))


_ASKED = {"node": ("node",), "worker": ("prefill", "decode"), "router": ("router",)}


def member_state(member: Member, quarantined: Collection[Identity]) -> str:
    """A node's state (`kvpool.policy.placement.NodeState`), as placement reads it."""
    return str(node_from_info(member.id, member.info, quarantined=member.identity in quarantined).state)


async def _ask_node(member: Member, state: str, timeout_s: float) -> NodeReport:
    rpc = PoolRpc(member.address, security=security())
    try:
        return NodeReport(member=member, state=state, description=await rpc.describe(timeout_s))
    except KvpoolError as error:
        return NodeReport(member=member, state=state, error=str(error))
    finally:
        await rpc.close()


async def _ask_worker(member: Member, timeout_s: float) -> WorkerReport:
    client = WorkerClient(member.address, security())
    try:
        return WorkerReport(member=member, status=await client.status(timeout_s))
    except KvpoolError as error:
        return WorkerReport(member=member, error=str(error))
    finally:
        await client.close()


async def _ask_router(member: Member, timeout_s: float) -> RouterReport:
    url = member.info.get("url", f"http://{member.address}")
    try:
        return RouterReport(
            member=member, url=url, health=await asyncio.to_thread(call, f"{url}/health", timeout_s=timeout_s, credentials=security())
        )
    except KvpoolError as error:
        return RouterReport(member=member, url=url, error=str(error))


def node_json(report: NodeReport) -> dict[str, Any]:
    """A node for programs: flat, sizes in bytes; offers by name."""
    who = {
        "id": report.member.id,
        "address": report.member.address,
        "incarnation": report.member.incarnation,
        "state": report.state,
        "error": report.error or None,
    }
    node = report.description
    if node is None:
        return who
    fields = ("capacity_bytes", "free_bytes", "used_bytes", "pinned_bytes", "blocks", "read_leases", "write_leases", "counters")
    return {**who, **{name: getattr(node, name) for name in fields}, "offers": offers(node)}


def worker_json(report: WorkerReport) -> dict[str, Any]:
    """A worker for programs."""
    member = report.member
    who = {
        "id": member.id,
        "role": member.role,
        "address": member.address,
        "incarnation": member.incarnation,
        "error": report.error or None,
    }
    return {**(asdict(report.status) if report.status is not None else {"model": member.info.get("model")}), **who}


def router_json(report: RouterReport) -> dict[str, Any]:
    """A router for programs."""
    return {"id": report.member.id, "url": report.url, "healthy": not report.error, "health": report.health, "error": report.error or None}


def offers(node: NodeDescription) -> list[str]:
    """Names of the reaches a node offers."""
    named = {"shm": node.shm is not None, "ucx": node.ucx is not None, "tcp": node.tcp is not None, "grpc": node.grpc_data}
    return [name for name, offered in named.items() if offered]
