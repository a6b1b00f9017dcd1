"""Near copies: what readers on a host ask of its node, fetched once from whoever has it."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvpool.block import BlockKey
from kvpool.client import health
from kvpool.errors import DeadlineError, LimitError, RemoteError
from kvpool.node.service import PoolNode
from kvpool.policy.placement import read_order
from kvpool.request.pool import NEAR
from kvpool.units import SECOND
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.pool_client import PoolRpc

from .cluster_rig import EXTENT_BLOCKS, LIMIT_S, Cluster
from .conftest import FRAMER


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    await made.close()


class Reader:
    """A reader on the host of one node, which is no owner of what it wants."""

    def __init__(self, cluster: Cluster, node: PoolNode) -> None:
        self.cluster = cluster
        self.node = node
        self.rpc = PoolRpc(node.address, NodeIdentity(node.node_id, node.incarnation))

    def order(self, head: BlockKey) -> tuple[str, ...]:
        """Whom to fetch from."""
        placed = [ref.placed for ref in self.cluster.side(self.node).links.nodes()]
        return read_order(head, placed, self.cluster.side(self.node).links.config.copies)

    async def get(self, keys: Sequence[BlockKey], *, limit_s: float = LIMIT_S, order: Sequence[str] | None = None) -> int:
        """How many of `keys` this node gives, whole and right."""
        order = self.order(keys[0]) if order is None else order
        lease_id, places = await self.rpc.acquire("reader", 10_000, keys, limit_s, fetch_from=order)
        count = 0
        for key, place in zip(keys, places, strict=True):
            if place is not None:
                arena = self.node.arena
                assert arena is not None
                assert FRAMER.open(arena.view(*place), key).payload[0] == key[0]
                count += 1
        if lease_id:
            await self.rpc.release(lease_id, (), LIMIT_S)
        return count


@pytest.fixture
async def reader(cluster: Cluster) -> AsyncIterator[Reader]:
    """Three nodes; the reader sits at the last one."""
    await cluster.open(3)
    made = Reader(cluster, cluster.nodes[f"{2:032x}"])
    yield made
    await made.rpc.close()


async def foreign(reader: Reader, *, first: int = 0, ttl_ns: int = 0, tenant: str = "", owner: str = "") -> list[BlockKey]:
    """An extent stored where its owner is another node than the reader's."""
    for chain in reader.cluster.chains(64, EXTENT_BLOCKS, first=first):
        (target, *_) = reader.order(chain[0])
        if target != reader.node.node_id and owner in ("", target):
            await reader.cluster.store([chain], ttl_ns=ttl_ns, tenant=tenant)
            return chain
    raise AssertionError("no such extent among so many")


def hits(cluster: Cluster, node_id: str) -> int:
    return cluster.pool(cluster.nodes[node_id]).counters()["hits"]


async def test_herd_costs_one_fetch_from_the_owner(reader: Reader) -> None:
    """However many ask at the same time, the network carries a block once, and the owner serves it once."""
    chain = await foreign(reader)
    (owner, *_) = reader.order(chain[0])
    before = hits(reader.cluster, owner)
    assert await asyncio.gather(*(reader.get(chain[:1]) for _ in range(64))) == [1] * 64
    counters = reader.cluster.counters(reader.node.node_id)
    assert hits(reader.cluster, owner) - before == 1
    assert (counters["near_fetched"], counters["near_missed"]) == (1, 0)
    assert counters["near_shared"] > 0
    assert await reader.get(chain) == len(chain)
    assert hits(reader.cluster, owner) - before == len(chain)
    assert await reader.get(chain) == len(chain)
    assert hits(reader.cluster, owner) - before == len(chain)


async def test_near_copy_is_marked_costs_no_quota_and_keeps_what_a_block_is(reader: Reader) -> None:
    """It is the owner's block on another host: same tenant and ttl, but nobody's bytes."""
    chain = await foreign(reader, ttl_ns=600 * SECOND, tenant="t")
    assert await reader.get(chain) == len(chain)
    here = reader.cluster.pool(reader.node)
    assert here.lookup(chain, time.monotonic_ns()) == bytes([NEAR] * len(chain))
    assert "t" not in here.quotas()
    view = here.view(chain[1])
    assert view is not None
    assert (view.tenant, view.parent, view.depth) == ("t", chain[0], 16)
    assert 500 * SECOND < view.expires_ns - view.committed_ns < 600 * SECOND


async def test_near_copies_stay_here_and_leave_for_the_nodes_own_blocks(reader: Reader) -> None:
    """The balancer neither pushes nor counts them; the node's own blocks take their room."""
    chain = await foreign(reader)
    assert await reader.get(chain) == len(chain)
    side = reader.cluster.side(reader.node)
    await reader.cluster.settled()
    assert side.balancer.report().blocks == 0
    assert side.counted()["pushed"] == 0
    assert reader.cluster.holders(chain[0], near=True) == {reader.node.node_id}
    here = reader.cluster.pool(reader.node)
    await reader.cluster.store(reader.cluster.chains(1600, EXTENT_BLOCKS, first=100))
    assert here.books().blocks > 1900
    assert here.lookup(chain, time.monotonic_ns()) == bytes(len(chain))


async def test_owner_that_fails_is_followed_by_the_next_then_by_a_miss(reader: Reader) -> None:
    """The order is tried in order; nobody left is a miss, not an error."""
    await reader.cluster.configure(copies=2)
    await reader.cluster.settled()
    here = reader.node.node_id
    chain = next(
        chain
        for chain in reader.cluster.chains(64, EXTENT_BLOCKS)
        if here not in reader.order(chain[0]) and len(reader.order(chain[0])) == 2
    )
    await reader.cluster.store([chain])
    first, second = reader.order(chain[0])
    await reader.cluster.crash(first)
    assert await reader.get(chain, order=("nobody", first, second)) == len(chain)
    assert await reader.get(reader.cluster.chains(1, first=900)[0], order=("nobody", first, second)) == 0


async def test_fetch_takes_no_longer_than_its_caller_waits_and_the_next_one_finds_the_block(reader: Reader) -> None:
    """A reader that gives up gets a miss in time; what is under way goes on for others only as long as somebody wants it."""
    chain = await foreign(reader)
    near = reader.cluster.side(reader.node).near
    gate = asyncio.Event()
    links = reader.cluster.side(reader.node).links
    real = links.link

    async def slow(*arguments: object) -> object:
        await gate.wait()
        return await real(*arguments)  # type: ignore[arg-type]

    links.link = slow  # type: ignore[method-assign, assignment]
    hasty = asyncio.create_task(reader.get(chain, limit_s=0.5))
    patient = asyncio.create_task(reader.get(chain, limit_s=LIMIT_S))
    assert await hasty == 0
    gate.set()
    assert await patient == len(chain)
    assert near.counters["near_fetched"] == len(chain)


async def test_impatient_readers_make_no_owner_ill(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node reports to the cluster whom it can't reach: a reader that has no time must not get owners voted out. Nor must a refusal."""
    monkeypatch.setattr(health, "REST_NS", 0)
    chain = await foreign(reader)
    errors: list[RemoteError] = [DeadlineError("too late"), LimitError("above its rate")]

    async def late(*args: Any, **options: Any) -> Any:
        raise errors[0]

    monkeypatch.setattr(PoolRpc, "acquire_stored", late)
    links = reader.cluster.side(reader.node).links
    for _ in errors.copy():
        for _ in range(4):
            assert await reader.get(chain[:1], limit_s=0.9) == 0
        assert links.health.ill() == []
        assert not any(map(links.resting, links.nodes()))
        errors.reverse()
    assert reader.cluster.counters(reader.node.node_id)["near_failed"] >= 8


async def test_near_copies_can_be_switched_off(reader: Reader) -> None:
    """`near_copies` of the cluster's config."""
    await reader.cluster.configure(near_copies=False)
    await reader.cluster.settled()
    chain = await foreign(reader)
    assert await reader.get(chain) == 0
    assert reader.cluster.holders(chain[0], near=True) == set()


async def test_damaged_block_is_not_kept_and_its_owner_is_told(reader: Reader) -> None:
    """A frame is checked on arrival; the owner looks for itself and drops it."""
    chain = await foreign(reader)
    (owner, *_) = reader.order(chain[0])
    node = reader.cluster.nodes[owner]
    place = reader.cluster.pool(node).locate(chain[1])
    assert place is not None
    assert node.arena is not None
    node.arena.view(*place)[-1] ^= 1
    assert await reader.get(chain) == len(chain) - 1
    assert reader.cluster.holders(chain[1]) == set()
    reader.cluster.pool(reader.node).check()


async def test_hot_extent_survives_a_crash_of_its_only_owner(reader: Reader) -> None:
    """What is read often gets a copy on the next node, which takes it over when the owner is gone."""
    await reader.cluster.configure(hot_reads=20)
    await reader.cluster.settled()
    chain = await foreign(reader, owner=f"{0:032x}")
    cold = await foreign(reader, first=200, owner=f"{0:032x}")
    for _ in range(25):
        assert await reader.cluster.load(chain) == len(chain)
    await reader.cluster.load(cold)
    async with asyncio.timeout(LIMIT_S):
        while not reader.cluster.holders(chain[-1], near=True):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert all(len(reader.cluster.holders(key, near=True)) == 1 for key in chain)
    assert reader.cluster.holders(cold[0], near=True) == set()
    await reader.cluster.crash(f"{0:032x}")
    await reader.cluster.settled()
    assert await reader.cluster.load(chain) == len(chain)
    assert reader.cluster.misplaced([chain]) == 0
