"""What the pool holds is asked of the right nodes, and never waited for long."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvpool.block import BlockKey, Geometry, Namespace, chain_keys
from kvpool.client import AsyncPoolClient
from kvpool.clock import ManualClock
from kvpool.cluster import Member
from kvpool.cluster.config import ClusterConfig
from kvpool.cluster.member import Identity
from kvpool.errors import RemoteError, UnavailableError
from kvpool.testing.node_process import NodeProcess
from kvpool.units import SECOND
from kvpool.wire.pool_client import PoolRpc
from router.pool import NodesProbe
from router.probe import GuardedProbe
from router.testing.cluster import ScriptedCluster
from router.testing.pool import ScriptedPool

BLOCK_TOKENS = 16
KEYS = chain_keys(b"\1" * 32, range(BLOCK_TOKENS * 200), BLOCK_TOKENS)


class Node:
    """A node that holds a set of keys."""

    def __init__(self, holds: set[BlockKey]) -> None:
        self.holds = holds
        self.asked: list[int] = []
        self.down = False
        self.closed = False

    async def lookup(self, keys: Sequence[bytes], timeout_s: float) -> bytes:
        """See `NodePort`."""
        self.asked.append(len(keys))
        if self.down:
            raise UnavailableError("gone")
        return bytes(key in self.holds for key in keys)

    async def close(self) -> None:
        """See `NodePort`."""
        self.closed = True


async def test_prefix_is_asked_of_every_owner_with_one_call_each() -> None:
    """Batched by node, and only its own share: a node is never asked for what it can't own."""
    cluster, nodes = ScriptedCluster("m"), [Node(set(KEYS[:150])) for _ in range(3)]
    for number, node in enumerate(nodes):
        cluster.add("node", node, id=f"{number:032x}")
    probe = NodesProbe(cluster, cluster.connect)
    assert await probe.longest_prefix(KEYS, BLOCK_TOKENS, 1.0) == 150
    assert sum(count for node in nodes for count in node.asked) == len(KEYS)
    assert all(len(node.asked) <= 1 for node in nodes)
    assert len([node for node in nodes if node.asked]) > 1
    await probe.close()
    assert all(node.closed for node in nodes if node.asked)


async def test_hole_ends_the_prefix() -> None:
    """Blocks behind a hole can't be used."""
    cluster = ScriptedCluster("m")
    cluster.add("node", Node({*KEYS[:40], *KEYS[41:]}))
    probe = NodesProbe(cluster, cluster.connect)
    assert await probe.longest_prefix(KEYS, BLOCK_TOKENS, 1.0) == 40
    await probe.close()


async def test_pool_without_nodes_holds_nothing() -> None:
    """That is an answer, not an error."""
    probe = NodesProbe(ScriptedCluster("m"), ScriptedCluster("m").connect)
    assert await probe.longest_prefix(KEYS, BLOCK_TOKENS, 1.0) == 0
    await probe.close()


async def test_node_that_left_is_disconnected_and_its_successor_asked() -> None:
    """A restarted node is another node, at whatever address."""
    cluster, old, new = ScriptedCluster("m"), Node(set(KEYS)), Node(set(KEYS[:5]))
    cluster.add("node", old, id="a" * 32, incarnation=1)
    probe = NodesProbe(cluster, cluster.connect)
    assert await probe.longest_prefix(KEYS, BLOCK_TOKENS, 1.0) == len(KEYS)
    cluster.add("node", new, id="a" * 32, incarnation=2)
    assert await probe.longest_prefix(KEYS, BLOCK_TOKENS, 1.0) == 5
    assert (old.closed, new.closed) == (True, False)
    await probe.close()


async def test_node_in_trouble_makes_the_answer_unknown() -> None:
    """Half an answer would look like a miss."""
    cluster, node = ScriptedCluster("m"), Node(set(KEYS))
    cluster.add("node", node)
    node.down = True
    probe = NodesProbe(cluster, cluster.connect)
    with pytest.raises(RemoteError):
        await probe.longest_prefix(KEYS, BLOCK_TOKENS, 1.0)
    await probe.close()


async def test_second_copy_is_asked_of_when_the_first_is_lost_or_incomplete() -> None:
    """With two copies of everything, neither one dead node nor one that was restarted empty hides the prefix."""
    cluster = ScriptedCluster("m")
    cluster.config = ClusterConfig(copies=2)
    full, empty, dead = [Node(set(KEYS)) for _ in range(3)]
    for number, node in enumerate((full, empty, dead)):
        cluster.add("node", node, id=f"{number:032x}")
    probe = NodesProbe(cluster, cluster.connect)
    dead.down = True
    assert await probe.longest_prefix(KEYS, BLOCK_TOKENS, 1.0) == len(KEYS)
    dead.down, empty.holds = False, set()
    assert await probe.longest_prefix(KEYS, BLOCK_TOKENS, 1.0) == len(KEYS)
    await probe.close()


async def test_quarantined_node_is_not_asked() -> None:
    """Nobody can reach it: asking would only cost the time limit."""
    cluster, well, ill = ScriptedCluster("m"), Node(set(KEYS)), Node(set(KEYS))
    cluster.add("node", well)
    cluster.ill.add(cluster.add("node", ill).identity)
    probe = NodesProbe(cluster, cluster.connect)
    assert await probe.longest_prefix(KEYS, BLOCK_TOKENS, 1.0) == len(KEYS)
    assert ill.asked == []
    await probe.close()


async def test_guard_rests_after_a_failure_and_asks_again_later() -> None:
    """A hung pool costs one request its time limit, not every request."""
    pool, clock = ScriptedPool(blocks=3), ManualClock()
    probe = GuardedProbe(pool, clock, 0.1)
    assert await probe.longest_prefix(KEYS, BLOCK_TOKENS) == 3
    pool.down = True
    assert await probe.longest_prefix(KEYS, BLOCK_TOKENS) is None
    pool.down = False
    assert await probe.longest_prefix(KEYS, BLOCK_TOKENS) is None
    assert pool.asked == 2
    clock.advance(5 * SECOND)
    assert await probe.longest_prefix(KEYS, BLOCK_TOKENS) == 3


async def test_guard_gives_up_on_a_silent_pool() -> None:
    """Its time limit holds even if the client's doesn't."""

    class Silent(ScriptedPool):
        async def longest_prefix(self, keys: Sequence[BlockKey], block_tokens: int, timeout_s: float) -> int:
            await asyncio.Event().wait()
            return 0

    assert await GuardedProbe(Silent(), ManualClock(), 0.01).longest_prefix(KEYS, BLOCK_TOKENS) is None


async def test_prompt_without_full_blocks_is_not_asked_about() -> None:
    """There is no key to ask for."""
    pool = ScriptedPool(blocks=3)
    assert await GuardedProbe(pool, ManualClock(), 0.1).longest_prefix([], BLOCK_TOKENS) == 0
    assert pool.asked == 0


class _TwoNodes:
    """A view of two real nodes."""

    config = ClusterConfig()

    def quarantined(self) -> frozenset[Identity]:
        """See `PoolView`."""
        return frozenset()

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = tuple(members)

    def members(self, role: str | None = None) -> tuple[Member, ...]:
        """See `PoolView`."""
        return self._members if role in (None, "node") else ()


async def _member(node: NodeProcess) -> Member:
    rpc = PoolRpc(node.address)
    try:
        description = await rpc.describe(10)
    finally:
        await rpc.close()
    return Member(role="node", id=description.node_id, incarnation=description.incarnation, address=node.address)


async def test_probe_of_real_nodes_finds_what_the_workers_client_stored(tmp_path: Path) -> None:
    """Router and workers must agree on who owns what, or the router would see misses everywhere."""
    geometry = Geometry.uniform(layers=1, kv_heads=1, head_dim=4, block_tokens=BLOCK_TOKENS, dtype="float32")
    namespace = Namespace(model="probe", revision="1", weights_digest=bytes(32), geometry=geometry, rope="none")
    with contextlib.ExitStack() as stack:
        nodes = []
        for _ in range(2):
            nodes.append(NodeProcess("--capacity", "4MiB", "--offer", "grpc", arena_dir=tmp_path))
            stack.callback(nodes[-1].stop)
        keys = chain_keys(namespace.root(), range(BLOCK_TOKENS * 200), BLOCK_TOKENS)
        async with await AsyncPoolClient.open(",".join(node.address for node in nodes), namespace) as pool:
            deadline_ns = time.monotonic_ns() + 30 * SECOND
            stored = await pool.store(keys, 0, [BLOCK_TOKENS] * 150, lambda index, payload: payload.fill(1), deadline_ns=deadline_ns)
            assert stored == 150
        probe = NodesProbe(_TwoNodes([await _member(node) for node in nodes]), PoolRpc)
        assert await probe.longest_prefix(keys, BLOCK_TOKENS, 10.0) == 150
        await probe.close()
