"""The simulated cluster: its books balance, it repeats itself, and its hits are bounded by a cache that forgets nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.block import BlockKey
from kvpool.errors import LocalError
from kvpool.policy.admission.early import EarlyRejection, Rejection
from kvpool.policy.routing import OURS, POLICIES, LeastTtft, WorkerOrder
from kvpool.replay.sim import Cluster, Fate, SimRequest, World, make_system, outcome
from kvpool.replay.sim.outcome import check
from kvpool.replay.simulate import sim_requests
from kvpool.replay.traces import read_trace

TRACES = Path(__file__).parents[3].parent / "shared" / "traces" / "mooncake"
WORLD = World(prefill_nodes=3, decode_nodes=2, node_blocks=40)

CHAINS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 12), st.integers(1, 512), st.floats(0, 2), st.integers(1, 60)), min_size=1, max_size=30
)


def requests(drawn: list[tuple[int, int, int, float, int]]) -> list[SimRequest]:
    """Requests of a few conversations: (whose, blocks, tokens of the last one, seconds since the one before, tokens of the answer)."""
    now, made = 0.0, []
    for number, (chain, blocks, last, passed, answer) in enumerate(drawn):
        now += passed
        keys = tuple(BlockKey(f"{chain}.{at}".encode().ljust(32, b".")) for at in range(blocks))
        made.append(SimRequest(str(number), now, (blocks - 1) * 512 + last, answer, keys, session=str(chain), adapter="x" * (chain == 5)))
    return made


def infinite(made: list[SimRequest]) -> int:
    """Tokens that a cache that forgets nothing and has everything at once would hit."""
    seen: set[BlockKey] = set()
    hit = 0
    for request in made:
        known = next((at for at, key in enumerate(request.keys) if key not in seen), len(request.keys))
        hit += min(known * 512, request.prompt_tokens - 1)
        seen.update(request.keys)
    return hit


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=12, deadline=None)
@given(drawn=CHAINS)
def test_every_request_ends_once_and_hits_no_more_than_there_is(name: str, drawn: list[tuple[int, int, int, float, int]]) -> None:
    """Whatever comes: `outcome` checks ends, times and busy seconds; hits stay below the infinite cache; a run repeats itself."""
    made, runs = requests(drawn), []
    for _ in range(2):
        cluster = Cluster(WORLD, make_system(name, 3))
        fates = cluster.run(made)
        runs.append(outcome(WORLD, cluster, fates))
        if name != OURS:  # whose decode nodes may prefill a request before an earlier one has begun
            assert sum(fate.hit_tokens for fate in fates) <= infinite(made)
    assert runs[0] == runs[1]
    assert runs[0].rejected == 0


@settings(max_examples=12, deadline=None)
@given(drawn=CHAINS, mode=st.sampled_from(list(Rejection)))
def test_rejected_requests_end_once_too(drawn: list[tuple[int, int, int, float, int]], mode: Rejection) -> None:
    """A tiny decode: some are turned away, before their prefill or after, and only the latter are wasted."""
    cluster = Cluster(WORLD, make_system(OURS), EarlyRejection(mode, 4000))
    fates = cluster.run(requests(drawn))
    figures = outcome(WORLD, cluster, fates)
    assert figures.wasted_prefills <= figures.rejected <= len(drawn)
    if mode is Rejection.NONE:
        assert figures.wasted_prefills == figures.rejected


def test_one_request_takes_what_the_formula_says() -> None:
    """4,096 tokens alone: l (a n^2 d + b n d^2) at half of 8 x 312 TFLOP/s; again after it: the last token only."""
    keys = tuple(BlockKey(bytes([at]) * 32) for at in range(8))
    fates = Cluster(WORLD, make_system(OURS)).run([SimRequest("a", 0.0, 4096, 10, keys), SimRequest("b", 50.0, 4096, 10, keys)])
    flops = 80 * (4 * 4096**2 * 8192 + 22 * 4096 * 8192**2)
    assert fates[0].ttft_s == pytest.approx(flops / (4 * 312e12))
    assert fates[1].hit_tokens == 4095
    assert fates[1].ttft_s is not None
    assert fates[1].ttft_s < 0.05


def test_concurrent_requests_for_one_cold_prefix_compute_it_once() -> None:
    """Single flight: eight at once with 40,000 common tokens, over four idle nodes that have learnt what computing and loading take."""
    world = World(prefill_nodes=4, decode_nodes=2)
    before = tuple(BlockKey(at.to_bytes(32, "little")) for at in range(1, 41))
    keys = tuple(BlockKey(at.to_bytes(32, "big")) for at in range(1, 80))
    made = [SimRequest(f"w{n}", 20.0 * n, (10 + 3 * n) * 512, 5, before[: 10 + 3 * n]) for n in range(10)]
    made += [SimRequest(str(n), 500 + 0.01 * n, 80 * 512, 5, (*keys, BlockKey(bytes([n, 255]) * 16))) for n in range(8)]
    computed = {}
    for single in (True, False):
        system = replace(make_system(OURS), single_flight=single)
        fates = Cluster(world, system).run(made)[10:]
        computed[single] = sum(fate.request.prompt_tokens - fate.hit_tokens for fate in fates)
    assert computed[True] == 80 * 512 + 7 * 512
    assert computed[False] >= 2 * computed[True]


def test_engine_that_computes_the_shortest_first_lets_it_pass() -> None:
    """A prompt of 100,000 tokens runs for half a minute; a short one behind it waits for a chunk, or for all of it."""
    world = World(prefill_nodes=1, decode_nodes=1)
    made = [SimRequest("long", 0.0, 100_000, 1, ()), SimRequest("short", 1.0, 600, 1, ())]
    for order, limit in ((WorkerOrder.SHORTEST, 0.5), (WorkerOrder.ARRIVAL, 60.0)):
        system = replace(make_system(OURS), policy=LeastTtft(order=order), order=order, help_tokens=0)
        short = Cluster(world, system).run(made)[1].ttft_s
        assert short is not None
        assert limit / 10 < short < limit


def test_books_that_do_not_balance_are_an_error() -> None:
    """A check that can't fail checks nothing."""
    cluster = Cluster(WORLD, make_system("random"))
    fates = cluster.run(requests([(0, 3, 5, 0.0, 4)]))
    fates[0].finished_s = None
    with pytest.raises(LocalError, match="never"):
        check(cluster, fates)
    with pytest.raises(LocalError, match="times"):
        check(cluster, [Fate(fates[0].request, first_token_s=-1.0, finished_s=3.0)])


@pytest.mark.skipif(not TRACES.exists(), reason="needs the Mooncake traces")
@pytest.mark.parametrize(("name", "most"), [("conversation", 0.3736), ("synthetic", 0.6512)])
def test_public_traces_hit_no_more_than_an_infinite_cache(name: str, most: float) -> None:
    """The oracle of the whole trace bounds its first 1,000 requests' own bound, which no policy passes; ours comes near it."""
    made = sim_requests(read_trace(TRACES / f"{name}_trace.jsonl"))[:1000]
    bound = infinite(made) / sum(request.prompt_tokens for request in made)
    for policy in ("least_loaded", "mooncake", OURS):
        world = World()
        cluster = Cluster(world, make_system(policy, 1))
        found = outcome(world, cluster, cluster.run(made))
        assert found.hit_rate <= bound <= most + 0.05
        assert found.imbalance <= 1.5
    assert found.hit_rate >= 0.9 * bound
