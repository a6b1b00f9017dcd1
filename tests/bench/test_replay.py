"""The replay: the published figures, the pool it stands for, and a bound that is one."""

from itertools import combinations
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.replay import Outcome, belady, infinite, prefill_seconds, references, replay
from bench.traces import read_trace
from kvpool.block import BlockKey
from kvpool.policy.eviction import POLICIES, make_policy
from kvpool.pool import PoolState, Reserve
from kvpool.replay.traces import Trace, TraceRequest

MOONCAKE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake"
NEEDS_TRACES = pytest.mark.skipif(not MOONCAKE.is_dir(), reason="the Mooncake traces are not at ../shared/traces/mooncake")


def trace_of(*requests: tuple[int, ...], block_tokens: int = 16) -> Trace:
    made = tuple(TraceRequest(i, block_tokens * len(blocks), 0, blocks) for i, blocks in enumerate(requests))
    return Trace(name="t", format="", block_tokens=block_tokens, requests=made, unique=1 + max(max(r) for r in requests))


def random_trace(seed: int, requests: int, branching: int, depth: int) -> Trace:
    """Random walks down a tree, so that every block has one parent."""
    choice, numbers = Random(seed), dict[tuple[int, ...], int]()
    walks = []
    for _ in range(requests):
        path = tuple(int(branching * choice.random() ** 2) for _ in range(choice.randint(1, depth)))
        walks.append(tuple(numbers.setdefault(path[: i + 1], len(numbers)) for i in range(len(path))))
    return trace_of(*walks)


@NEEDS_TRACES
@pytest.mark.parametrize(
    ("name", "everything", "lru"),
    [("conversation", 0.3736, {5_860: 0.138, 10_000: 0.215}), ("synthetic", 0.6512, {5_860: 0.315, 10_000: 0.431})],
)
def test_replay_of_the_mooncake_traces_gives_the_known_token_hits(name: str, everything: float, lru: dict[int, float]) -> None:
    """Independent simulators found these figures; a replay that doesn't is another experiment."""
    trace = read_trace(str(MOONCAKE / f"{name}_trace.jsonl"))
    assert infinite(trace).token_hit == pytest.approx(everything, abs=5e-5)
    for capacity, expected in lru.items():
        assert replay(trace, make_policy("lru"), capacity).token_hit == pytest.approx(expected, abs=0.003)


@NEEDS_TRACES
@pytest.mark.parametrize(
    ("policy", "known"),
    [("clock", {1_000: 0.046, 5_860: 0.141, 10_000: 0.218}), ("s3fifo", {1_000: 0.057, 5_860: 0.160, 10_000: 0.206})],
)
def test_replay_of_the_conversation_trace_agrees_for_other_policies(policy: str, known: dict[int, float]) -> None:
    """The same for CLOCK and S3-FIFO with a small queue of a tenth."""
    trace = read_trace(str(MOONCAKE / "conversation_trace.jsonl"))
    for capacity, expected in known.items():
        assert replay(trace, make_policy(policy), capacity).token_hit == pytest.approx(expected, abs=0.003)


def test_replay_counts_the_leading_run_only() -> None:
    """What lies behind a gap has to be computed anyway."""
    trace = trace_of((0, 1), (2,), (0, 1, 3))
    fifo = replay(trace, make_policy("temporal"), 2)  # gives up heads first: 0 goes, 1 stays
    assert (fifo.block_hit, fifo.token_hit) == (0.0, 0.0)
    lru = replay(trace, make_policy("lru"), 2)  # 1 goes, 0 stays
    assert (lru.block_hit, lru.token_hit) == (1 / 6, 1 / 6)


def test_replay_last_block_counts_the_tokens_the_prompt_has() -> None:
    """A prompt can't hit more tokens than it has."""
    requests = (TraceRequest(0, 20, 0, (0, 1)), TraceRequest(1, 20, 0, (0, 1)))
    outcome = infinite(Trace(name="t", format="", block_tokens=16, requests=requests, unique=2))
    assert outcome == Outcome(token_hit=0.5, block_hit=0.5, recompute_seconds_saved=prefill_seconds(20))


def test_replay_request_larger_than_the_store_keeps_its_head() -> None:
    """The head is useful without the tail."""
    trace = trace_of((0, 1, 2, 3, 4), (0, 1, 2, 3, 4))
    for name in POLICIES:
        assert replay(trace, make_policy(name), 3).block_hit == 0.3


def test_prefill_seconds_follow_the_paper_s_formula() -> None:
    """l (a n² d + b n d²) at 2,496 TFLOP/s: the second half of a prompt costs more than the first."""
    assert prefill_seconds(1000) == pytest.approx(80 * (4 * 1e6 * 8192 + 22 * 1e3 * 8192**2) / 2.496e15)
    assert prefill_seconds(2000) > 2 * prefill_seconds(1000)


@given(st.integers(0, 1 << 16), st.integers(2, 12))
@settings(deadline=None, max_examples=30)
def test_replay_hits_what_the_pool_itself_would_hit(seed: int, capacity: int) -> None:
    """A replay stands for a node only if `PoolState` over the same policy finds the same blocks, request by request."""
    trace = random_trace(seed, requests=60, branching=3, depth=5)
    pool, hits = PoolState(64 * capacity, make_policy("prefix-lru")), 0
    for at_ns, _, _, blocks, *_ in trace.requests:
        keys = [BlockKey(block.to_bytes(32, "big")) for block in blocks]
        got = pool.acquire(keys, owner="r", lease_ns=1, now_ns=at_ns)
        pool.release(got.lease_id, at_ns)
        found = [location is not None for location in got.found]
        hits += found.index(False) if False in found else len(found)
        items = [Reserve(k, keys[i - 1] if i else None, 16 * i, 64) for i, k in enumerate(keys) if not found[i]]
        if items:
            granted = pool.reserve(items, owner="w", lease_ns=1, now_ns=at_ns)
            pool.commit(granted.lease_id, [item.key for item in items], at_ns)
            pool.release(granted.lease_id, at_ns)
    assert replay(trace, make_policy("prefix-lru"), capacity).block_hit == hits / references(trace)


def best_hits(trace: Trace, capacity: int) -> int:
    """Block hits of the best choice, by trying every set of blocks to keep after every request."""
    states = {frozenset[int](): 0}
    for _, _, _, blocks, *_ in trace.requests:
        after: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            run = 0
            while run < len(blocks) and blocks[run] in held:
                run += 1
            choices = sorted(held | set(blocks))
            for kept in combinations(choices, min(capacity, len(choices))):
                key = frozenset(kept)
                after[key] = max(after.get(key, 0), hits + run)
        states = after
    return max(states.values())


@given(st.integers(0, 1 << 16), st.integers(1, 4))
@settings(deadline=None, max_examples=40)
def test_belady_is_the_best_of_all_choices(seed: int, capacity: int) -> None:
    """A bound that some policy could beat, or that none could reach, would make every gap a wrong figure."""
    trace = random_trace(seed, requests=8, branching=2, depth=3)
    assert belady(trace, capacity).block_hit * references(trace) == pytest.approx(best_hits(trace, capacity))


@pytest.mark.parametrize("name", POLICIES)
def test_policy_never_beats_the_bounds(name: str) -> None:
    """More hits than Belady, or than a store that never evicts, would be a bug in the counting."""
    for seed in range(6):
        trace = random_trace(seed, requests=300, branching=4, depth=6)
        most = infinite(trace).block_hit
        for capacity in (3, 10, 40, 10_000):
            assert replay(trace, make_policy(name), capacity).block_hit <= belady(trace, capacity).block_hit <= most
        assert replay(trace, make_policy(name), 10_000).block_hit == most
