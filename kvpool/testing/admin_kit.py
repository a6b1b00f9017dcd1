"""The contract of `AdminHandler`, as tests over the wire: subclass `AdminKit` and provide a fixture `world`.

The twin and a real node pass the same kit, so that what operators' tools are tested against can't drift from what they meet.
"""

from collections.abc import Sequence
from typing import Protocol

import pytest

from kvpool.errors import ConfigError, UnavailableError
from kvpool.request.admin import EvictOutcome, PinOutcome
from kvpool.testing.membership_kit import DEADLINE_S
from kvpool.wire.admin_client import AdminRpc
from kvpool.wire.fence import NodeIdentity

LIMIT_S = float(DEADLINE_S)
STRANGER = b"\xee" * 32


class AdminWorld(Protocol):
    """A node under test and what may happen to it."""

    identity: NodeIdentity
    rpc: AdminRpc
    tier: str
    """The fastest tier's name."""

    async def put(self, count: int) -> list[bytes]:
        """Store a new chain of `count` blocks, committed and unleased; its keys."""
        ...

    async def lease(self, keys: Sequence[bytes]) -> int:
        """Take a read lease as the owner "reader"; its id."""
        ...

    async def release(self, lease_id: int) -> None:
        """End it."""
        ...

    async def damage(self, key: bytes) -> None:
        """Flip a bit in the fastest tier's copy."""
        ...


async def used_bytes(world: AdminWorld) -> int:
    """What the fastest tier's books say is taken."""
    return (await world.rpc.tiers(LIMIT_S))[0].used_bytes


async def present(world: AdminWorld, keys: Sequence[bytes]) -> list[bool]:
    """Which of `keys` the node holds."""
    return [bool(block.tiers) for block in await world.rpc.inspect(keys, LIMIT_S)]


class AdminKit:
    """Tests every admin handler must pass."""

    async def test_inspect_tells_where_a_block_is_and_how_it_stands(self, world: AdminWorld) -> None:
        """A chain's blocks name their heads and their places; a key nobody stored is absent."""
        first, second = await world.put(2)
        one, two, nothing = await world.rpc.inspect([first, second, STRANGER], LIMIT_S)
        assert (one.depth, two.parent, two.depth) == (0, first, one.n_tokens)
        assert one.tiers[0].name == world.tier
        assert one.size >= one.tiers[0].length > 0
        assert (one.leases, one.pins, one.story) == ((), (), ())
        assert (nothing.key, nothing.tiers) == (STRANGER, ())

    async def test_inspect_is_no_use_of_a_block(self, world: AdminWorld) -> None:
        """Who looks at a block must not keep it warm, or lease it."""
        keys = await world.put(1)
        (before,) = await world.rpc.inspect(keys, LIMIT_S)
        for _ in range(3):
            (after,) = await world.rpc.inspect(keys, LIMIT_S)
        assert (after.hits, after.lease_count) == (before.hits, 0)
        assert after.idle_ms >= before.idle_ms

    async def test_inspect_names_lease_and_pin_holders(self, world: AdminWorld) -> None:
        """An operator who wonders why a block stays learns who holds it, and for how long."""
        keys = await world.put(1)
        lease_id = await world.lease(keys)
        await world.rpc.pin(keys, LIMIT_S, owner="ops", duration_ms=60_000, hard=True)
        (block,) = await world.rpc.inspect(keys, LIMIT_S)
        (lease,), (pin,) = block.leases, block.pins
        assert (lease.id, lease.owner, lease.kind, block.lease_count) == (lease_id, "reader", "read", 1)
        assert (pin.owner, pin.hard, block.pin_count) == ("ops", True, 1)
        assert 0 < pin.left_ms <= 60_000
        await world.release(lease_id)

    async def test_story_is_told_when_asked_also_of_a_block_that_is_gone(self, world: AdminWorld) -> None:
        """ "Where has it gone" is the question; the story answers it after the block has."""
        keys = await world.put(1)
        assert await world.rpc.evict(keys, LIMIT_S) == [EvictOutcome.EVICTED]
        (gone,) = await world.rpc.inspect(keys, LIMIT_S, story=True)
        assert gone.tiers == ()
        assert len(gone.story) >= 2

    async def test_evict_removes_what_is_there_and_a_dry_run_nothing(self, world: AdminWorld) -> None:
        """What a dry run says is what the real run does."""
        keys = await world.put(2)
        asked = [*keys, STRANGER]
        expected = [EvictOutcome.EVICTED, EvictOutcome.EVICTED, EvictOutcome.ABSENT]
        assert await world.rpc.evict(asked, LIMIT_S, dry_run=True) == expected
        assert await present(world, keys) == [True, True]
        assert await world.rpc.evict(asked, LIMIT_S) == expected
        assert await present(world, keys) == [False, False]

    async def test_evict_of_a_leased_block_unlinks_it_and_its_bytes_wait_for_the_lease(self, world: AdminWorld) -> None:
        """Nobody new finds it, and nobody's bytes change under a reader."""
        empty = await used_bytes(world)
        keys = await world.put(1)
        lease_id = await world.lease(keys)
        assert await world.rpc.evict(keys, LIMIT_S) == [EvictOutcome.HELD]
        assert await present(world, keys) == [False]
        assert await used_bytes(world) > empty
        await world.release(lease_id)
        assert await used_bytes(world) == empty

    async def test_hard_pin_keeps_a_block_until_it_is_ended(self, world: AdminWorld) -> None:
        """What an operator pinned hard, an operator has to unpin before it goes."""
        keys = await world.put(1)
        assert await world.rpc.pin([*keys, STRANGER], LIMIT_S, owner="ops", duration_ms=60_000, hard=True) == [
            PinOutcome.PINNED,
            PinOutcome.ABSENT,
        ]
        for dry_run in (True, False):
            assert await world.rpc.evict(keys, LIMIT_S, dry_run=dry_run) == [EvictOutcome.PINNED]
        assert await world.rpc.unpin(keys, LIMIT_S, owner="somebody else") == 0
        assert await world.rpc.unpin([*keys, STRANGER], LIMIT_S, owner="ops") == 1
        assert await world.rpc.evict(keys, LIMIT_S) == [EvictOutcome.EVICTED]

    async def test_quotas_are_set_listed_and_removed(self, world: AdminWorld) -> None:
        """A quota stands until it is taken away."""
        await world.rpc.set_quota("team", 1 << 20, LIMIT_S)
        (team,) = [quota for quota in await world.rpc.quotas(LIMIT_S) if quota.tenant == "team"]
        assert (team.used_bytes, team.max_bytes) == (0, 1 << 20)
        await world.rpc.set_quota("team", 0, LIMIT_S)
        assert [quota.max_bytes for quota in await world.rpc.quotas(LIMIT_S) if quota.tenant == "team"] in ([], [None])

    async def test_gc_keeps_what_is_alive(self, world: AdminWorld) -> None:
        """Collecting is about what has run out; the head that was evicted leaves an orphan that is counted and still served."""
        keys = await world.put(2)
        await world.rpc.evict(keys[:1], LIMIT_S)
        for dry_run in (True, False):
            report = await world.rpc.gc(LIMIT_S, dry_run=dry_run)
            assert report.orphan_blocks == 1
            assert report.orphan_bytes > 0
        assert await present(world, keys) == [False, True]

    async def test_verify_goes_over_every_block_once_and_drops_the_corrupt(self, world: AdminWorld) -> None:
        """However small the steps; a damaged block is named, gone, and not counted twice."""
        keys = await world.put(5)
        await world.damage(keys[2])
        checked, corrupt, cursor = 0, list[bytes](), ""
        for _ in range(20):
            step = await world.rpc.verify(world.tier, LIMIT_S, cursor=cursor, max_bytes=1)
            checked += step.checked
            corrupt += step.corrupt
            assert step.corrupt_count == len(step.corrupt)
            cursor = step.cursor
            if not cursor:
                break
        assert (checked, corrupt, cursor) == (5, [keys[2]], "")
        assert await present(world, keys) == [True, True, False, True, True]
        whole = await world.rpc.verify(world.tier, LIMIT_S)
        assert (whole.checked, whole.corrupt_count, whole.cursor) == (4, 0, "")
        assert whole.checked_bytes > 0

    async def test_verify_of_no_such_tier_says_so(self, world: AdminWorld) -> None:
        """A typo must not look like a clean scrub."""
        with pytest.raises(ConfigError, match="no-such"):
            await world.rpc.verify("no-such", LIMIT_S)

    async def test_tiers_keep_books(self, world: AdminWorld) -> None:
        """Every tier says how full it is and how it is."""
        before = (await world.rpc.tiers(LIMIT_S))[0]
        await world.put(3)
        after = (await world.rpc.tiers(LIMIT_S))[0]
        assert (after.name, after.state, after.reason) == (world.tier, "ok", "")
        assert after.objects == before.objects + 3
        assert before.used_bytes < after.used_bytes <= after.capacity_bytes

    async def test_changes_meant_for_another_life_are_refused(self, world: AdminWorld) -> None:
        """A cursor, an eviction or a quota for a node that is gone must not hit its successor."""
        keys = await world.put(1)
        rpc = AdminRpc(world.rpc.address, _earlier_life(world.identity))
        try:
            for call in (
                rpc.evict(keys, LIMIT_S),
                rpc.pin(keys, LIMIT_S, owner="ops", duration_ms=1000),
                rpc.unpin(keys, LIMIT_S, owner="ops"),
                rpc.set_quota("team", 1, LIMIT_S),
                rpc.gc(LIMIT_S),
                rpc.verify(world.tier, LIMIT_S),
            ):
                with pytest.raises(UnavailableError, match="was meant for"):
                    await call
        finally:
            await rpc.close()
        assert await present(world, keys) == [True]

    async def test_balance_counts_what_is_held_and_is_settled_where_nothing_is_to_be_moved(self, world: AdminWorld) -> None:
        """Whoever waits for a node to be done must not wait for one that has nothing to do."""
        await world.put(3)
        report = await world.rpc.balance(LIMIT_S)
        assert (report.state, report.settled) == ("active", True)
        assert report.safe_blocks == report.blocks == 3
        assert report.safe_bytes == report.block_bytes > 0


def _earlier_life(identity: NodeIdentity) -> NodeIdentity:
    """The same node in an earlier life."""
    return identity._replace(incarnation=identity.incarnation - 1)
