"""PoolState: what transcripts and the state machine don't say."""

import ast
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from kvpool.block import BlockKey
from kvpool.policy.eviction import Arrival, PrefixLru
from kvpool.pool import NO_SPACE, TRANSITIONS, Granted, InvariantError, PoolLimits, PoolState, Reserve
from kvpool.pool.blocks import Blocks
from kvpool.pool.resident import State

ROOT = Path(__file__).parents[2]


def keys(name: str, count: int) -> list[BlockKey]:
    return [BlockKey(sha256(f"{name}{i}".encode()).digest()) for i in range(count)]


def chain(name: str, count: int, length: int = 64) -> list[Reserve]:
    names = keys(name, count)
    return [Reserve(key, names[i - 1] if i else None, 16 * i, length) for i, key in enumerate(names)]


def put(pool: PoolState, items: list[Reserve], now_ns: int = 0) -> int:
    """Reserve and commit; how many got room."""
    got = pool.reserve(items, owner="w", lease_ns=100, now_ns=now_ns)
    granted = [item.key for item, grant in zip(items, got.grants, strict=True) if isinstance(grant, Granted)]
    assert all(pool.commit(got.lease_id, granted, now_ns))
    return len(granted)


def test_reserve_of_a_chain_longer_than_the_pool_keeps_its_head() -> None:
    """A head is useful without its tail, so a batch isn't all-or-nothing, and it doesn't evict itself."""
    pool = PoolState(64 * 10, PrefixLru())
    items = chain("a", 15)
    assert put(pool, items) == 10
    assert list(pool.lookup([item.key for item in items], 0)) == [1] * 10 + [0] * 5


def test_reserve_fills_by_evicting_idle_chains_tail_first() -> None:
    """Old conversations shrink from the end; their heads serve until the last moment."""
    pool = PoolState(64 * 10, PrefixLru())
    put(pool, chain("old", 6))
    put(pool, chain("mid", 4))
    put(pool, chain("new", 3))
    assert list(pool.lookup(keys("old", 6), 0)) == [1, 1, 1, 0, 0, 0]
    assert list(pool.lookup(keys("mid", 4), 0)) == [1] * 4


def test_lookup_does_not_change_the_order_of_eviction() -> None:
    """A router probes all day; only readers keep blocks alive."""
    pool = PoolState(64 * 4, PrefixLru())
    put(pool, chain("a", 2))
    put(pool, chain("b", 2))
    pool.lookup(keys("a", 2), 1)
    put(pool, chain("c", 2), 2)
    assert (pool.lookup(keys("a", 2), 2), pool.lookup(keys("b", 2), 2)) == (b"\0\0", b"\1\1")


def test_acquire_keeps_what_is_used() -> None:
    """A hit counts for the block even after its lease has ended."""
    pool = PoolState(64 * 4, PrefixLru())
    put(pool, chain("a", 2))
    put(pool, chain("b", 2))
    assert pool.release(pool.acquire(keys("a", 2), owner="r", lease_ns=10, now_ns=1).lease_id, 1)
    put(pool, chain("c", 2), 2)
    assert (pool.lookup(keys("a", 2), 2), pool.lookup(keys("b", 2), 2)) == (b"\1\1", b"\0\0")


def test_acquire_of_a_suffix_is_served_without_its_head() -> None:
    """Keys are pure: a child is right whatever became of its parent, and the caller decides about runs."""
    pool = PoolState(64 * 4, PrefixLru())
    put(pool, chain("a", 3))
    assert pool.discard(keys("a", 3)[0])
    found = pool.acquire(keys("a", 3), owner="r", lease_ns=10, now_ns=1).found
    assert [at is not None for at in found] == [False, True, True]
    pool.check()


def test_reserve_of_a_block_no_gap_could_take_spares_the_pool() -> None:
    """Leased blocks sprinkled over the arena leave no room for a large one; emptying the pool for it would help nobody."""
    pool = PoolState(64 * 200, PrefixLru())
    for index in range(200):
        put(pool, chain(f"s{index}-", 1))
    held = [keys(f"s{index}-", 1)[0] for index in range(0, 200, 20)]
    assert pool.acquire(held, owner="r", lease_ns=100, now_ns=1).lease_id
    large = [Reserve(key, None, 0, 64 * 30) for key in keys("large", 3)]
    assert pool.reserve(large, owner="w", lease_ns=10, now_ns=2).grants == (NO_SPACE,) * 3
    assert pool.books().blocks >= 200 - 3 * 16
    fits = pool.reserve([Reserve(keys("fits", 1)[0], None, 0, 64 * 19)], owner="w", lease_ns=10, now_ns=2)
    assert isinstance(fits.grants[0], Granted)
    pool.check()


def test_slab_among_many_small_blocks_does_not_look_at_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One event loop serves everybody: what a large extent takes must not grow with the arena while next to nothing is leased."""
    pool = PoolState(64 * 200, PrefixLru())
    put(pool, chain("small", 200))
    assert pool.acquire(keys("small", 1), owner="r", lease_ns=100, now_ns=1).lease_id
    monkeypatch.setattr(Blocks, "firm", lambda blocks: pytest.fail("looked at every block"))
    assert pool.grant_slab(64 * 40, owner="w", lease_ns=100, now_ns=2) is not None
    assert pool.books().blocks == 160


def test_check_after_a_lost_byte_names_the_block_and_its_story() -> None:
    """When the books don't balance, the message says which block and what happened to it."""
    pool = PoolState(64 * 4, PrefixLru())
    put(pool, chain("a", 2))
    lost = keys("a", 2)[1]
    pool._pens.policy.removed(lost)
    with pytest.raises(InvariantError) as caught:
        pool.check()
    assert lost.hex() in str(caught.value)
    assert "committed (lease 1)" in str(caught.value)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        ("p._blocks.committed[K[0]].grips += 1", "1 grips, hard=False; leases hold it 0 times"),
        ("p._blocks.committed[K[0]].state = State.RESERVED", "indexed as COMMITTED"),
        ("p._blocks.ledger.used_bytes -= 64; p._blocks.ledger.free_bytes += 64", "booked"),
        ("p._blocks.allocator.free(p._blocks.committed[K[0]].location.offset)", "the allocator says None"),
        ("p._blocks.allocator.allocate(64)", "leaked"),
        ("p._leases.references += 1", "references"),
        ("p._blocks.gripped += 1", "0 blocks are gripped, 1 are counted"),
        ("p._blocks.committed[K[0]].expires_ns = 5", "ttl"),
        ("p._pens.policy.inserted(Arrival(bytes(32), None, 0, 64), 0)", "policy knows 3"),
        ("p._blocks.allocator.free_bytes -= 64", "holes hold"),
        ("p._blocks.tenant_bytes[''] = 64", "tenants"),
        ("p._keeper.hard_bytes += 64", "hard pins hold 0"),
        ("p._blocks.committed[K[0]].soft = True", "soft=True"),
        ("p._blocks.extents[64] = p._blocks.committed[K[0]]", "lies at its offset|found at 64"),
    ],
)
def test_check_finds_every_kind_of_damage(break_it: str, message: str) -> None:
    """An audit that can't fail proves nothing."""
    pool = PoolState(64 * 4, PrefixLru())
    put(pool, chain("a", 2))
    pool.check()
    exec(break_it, {"p": pool, "K": keys("a", 2), "State": State, "Arrival": Arrival})
    with pytest.raises(InvariantError, match=message):
        pool.check()


def test_impossible_transition_raises_with_the_story() -> None:
    """The table is the law: what isn't in it can't happen silently."""
    pool = PoolState(64 * 4, PrefixLru())
    put(pool, chain("a", 1))
    with pytest.raises(InvariantError, match="commit while COMMITTED"):
        pool._blocks.publish([pool._blocks.committed[keys("a", 1)[0]]])


def test_transitions_end_where_they_began_and_skip_no_state() -> None:
    """Every state is reachable and every block can become absent again: no bytes without a way back."""
    targets = set(TRANSITIONS.values())
    assert targets == set(State)
    reaches = {State.ABSENT}
    for _ in State:
        reaches |= {before for (before, _), after in TRANSITIONS.items() if after in reaches}
    assert reaches == set(State)


def test_docs_show_the_table_and_the_limits() -> None:
    """The documented life cycle is the code's, transition by transition, limit by limit."""
    text = (ROOT / "docs" / "pool.md").read_text()
    for (before, event), after in TRANSITIONS.items():
        assert f"| {before.name} | {event} | {after.name} |" in text
    for name in PoolLimits.__dataclass_fields__:
        assert f"| `{name}` | {getattr(PoolLimits(), name):,} |" in text


HISTORY = """
import random
from hashlib import sha256
from kvpool.policy.eviction import PrefixLru
from kvpool.pool import PoolLimits, PoolState, Reserve, Granted
r = random.Random(5)
pool = PoolState(64 * 300, PrefixLru(), PoolLimits(max_leases=20))
digest, now = sha256(), 0
for step in range(1500):
    now += r.randrange(3)
    name = r.randrange(30)
    keys = [sha256(b"%d/%d" % (name, i)).digest() for i in range(r.randrange(1, 20))]
    if r.random() < 0.5:
        items = [Reserve(k, keys[i - 1] if i else None, 16 * i, r.choice([64, 200, 640]), r.choice([0, 0, 40])) for i, k in enumerate(keys)]
        got = pool.reserve(items, owner="w", lease_ns=20, now_ns=now)
        digest.update(repr(got).encode())
        digest.update(repr(pool.commit(got.lease_id, keys, now)).encode())
    else:
        digest.update(repr(pool.acquire(keys, owner="r", lease_ns=r.randrange(1, 60), now_ns=now)).encode())
    if r.random() < 0.1:
        pool.discard(keys[-1])
    digest.update(repr((pool.books(), pool.counters())).encode())
pool.check()
print((digest.hexdigest(), pool.counters()))
"""


def test_history_under_two_hash_seeds_is_the_same() -> None:
    """Decisions never depend on the order of a set: a seed replays anywhere."""
    outputs = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", HISTORY],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        outputs.append(ast.literal_eval(done.stdout))
    assert outputs[0] == outputs[1]
    assert min(outputs[0][1][name] for name in ("hits", "evicted", "expired", "discarded", "refused", "reclaimed_leases")) > 0
