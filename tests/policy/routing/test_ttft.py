"""Ours: what it counts, and that nothing jumps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.policy.routing import Ask, Candidate, LeastTtft, Load, Observed, Pending, Scored, Source, Tier, WorkerOrder, WorkerRef
from kvpool.units import SECOND

TOKEN_S = 1e-4
A, B = WorkerRef("prefill", "aa", 1), WorkerRef("prefill", "bb", 1)


def policy(order: WorkerOrder = WorkerOrder.SHORTEST) -> LeastTtft:
    """One that has learnt: 100 us a token to compute, 10 us to load from far memory, 200 us from disk."""
    made = LeastTtft(order=order)
    for number in range(40):
        tokens = 100 * (number + 1)
        loads = (Load(Tier.DRAM, False, 1000, 10_000_000), Load(Tier.SSD, True, 1000, 200_000_000))
        seen = Observed(loads=loads, computed_tokens=tokens, compute_ns=int(tokens * TOKEN_S * SECOND))
        made.first_token(str(number), (A, B)[number % 2], seen, 0)
    return made


def score(made: LeastTtft, ask: Ask, candidate: Candidate, now_ns: int = 0) -> Scored:
    ranking = made.rank(ask, [candidate], now_ns)
    assert ranking is not None
    return ranking.best


def terms(scored: Scored) -> dict[str, float]:
    return dict(scored.terms)


def test_cost_is_the_sum_of_named_terms() -> None:
    """An explanation that doesn't add up explains nothing."""
    scored = score(policy(), Ask("r", 5000), Candidate(worker=A, pool=(Source(Tier.DRAM, False, 4000),)))
    assert scored.cost == pytest.approx(sum(value for _, value in scored.terms))
    assert terms(scored)["compute"] == pytest.approx(0.1, rel=0.05)
    assert terms(scored)["load"] == pytest.approx(0.04, rel=0.05)
    assert (scored.fetch_tokens, scored.compute_tokens) == (4000, 1000)


def test_disk_slower_than_computing_is_not_read() -> None:
    """Never slower than recompute: what comes from memory is taken, the disk behind it is not."""
    pool = (Source(Tier.DRAM, False, 2000), Source(Tier.SSD, True, 2000))
    scored = score(policy(), Ask("r", 5000), Candidate(worker=A, pool=pool))
    assert (scored.fetch_tokens, scored.compute_tokens) == (2000, 3000)


def test_loads_hide_behind_the_queue() -> None:
    """Loads begin while the request waits: a queue of 1 s hides .04 s of loading."""
    made = policy(WorkerOrder.ARRIVAL)
    candidate = Candidate(worker=A, pool=(Source(Tier.DRAM, False, 4000),))
    made.routed(Ask("q", 10_000), Scored(Candidate(worker=A), 0, (), 0, 10_000), 0)
    found = terms(score(made, Ask("r", 5000), candidate))
    assert found["queue"] == pytest.approx(1.0, rel=0.05)
    assert found["load"] == 0


def test_short_request_passes_a_long_one_and_pays_for_its_delay() -> None:
    """On a worker that computes the shortest first: no queue, but its own seconds as the other's delay."""
    made = policy()
    made.routed(Ask("q", 50_000), Scored(Candidate(worker=A), 0, (), 0, 50_000), 0)
    found = terms(score(made, Ask("r", 1000), Candidate(worker=A)))
    assert found["queue"] == 0
    assert found["others"] == pytest.approx(0.1, rel=0.05)


def test_tenant_beyond_its_share_pays_more_for_the_delay_of_others() -> None:
    """Fair tenants: who has twice his share goes where he disturbs least."""
    made = policy()
    made.routed(Ask("q", 50_000), Scored(Candidate(worker=A), 0, (), 0, 50_000), 0)
    once = terms(score(made, Ask("r", 1000, tenant_share=1.0), Candidate(worker=A)))["others"]
    twice = terms(score(made, Ask("r", 1000, tenant_share=2.0), Candidate(worker=A)))["others"]
    assert twice == pytest.approx(2 * once)


def test_adapter_and_memory_cost_their_seconds() -> None:
    """A worker without the adapter, and one without room."""
    ask = Ask("r", 1000, adapter="x")
    assert terms(score(policy(), ask, Candidate(worker=A, adapter_loaded=False, free_tokens=1000)))["adapter"] > 0
    assert terms(score(policy(), ask, Candidate(worker=A, price_s=1e-3, free_tokens=400)))["memory"] == pytest.approx(0.6)


def test_it_waits_for_another_computation_only_when_that_is_sooner() -> None:
    """A prefix of 20,000 tokens costs 2 s: worth waiting half a second for, not five."""
    for ready_s, waits in ((0.5, True), (5.0, False)):
        pending = (Pending(B, 20_000, int(ready_s * SECOND)),)
        scored = score(policy(), Ask("r", 20_100, pending=pending), Candidate(worker=A))
        assert (scored.wait_ns > 0) is waits
        assert scored.compute_tokens == (100 if waits else 20_100)


def test_it_is_more_patient_before_anybody_is_chosen() -> None:
    """2 s of computing: a wait of 3 s is worth it where nobody else is busy, one of 5 s isn't, but where others are busy for longer."""
    for ready_s, others_s, waits in ((2.0, 0, True), (3.0, 0, True), (5.0, 0, False), (5.0, 2, True), (-3.0, 0, True)):
        made = policy(WorkerOrder.ARRIVAL)
        for number, worker in enumerate((A, B)):
            made.routed(Ask(f"q{number}", others_s * 10_000), Scored(Candidate(worker=worker), 0, (), 0, others_s * 10_000), 10**10)
        ask = Ask("r", 20_100, pending=(Pending(B, 20_000, 10**10 + int(ready_s * SECOND)),))
        assert made.waits(ask, [Candidate(worker=A), Candidate(worker=B)], 10**10) is waits


def test_it_waits_for_nothing_that_brings_it_less_than_it_computes() -> None:
    """500 of 2,000 tokens, in 5 s: a fifth of a second of computing isn't worth it. A worker that has them already changes nothing."""
    for resident in (0, 500):
        ask = Ask("r", 2000, pending=(Pending(B, 500, 5 * SECOND),))
        assert not policy().waits(ask, [Candidate(worker=A, resident_tokens=resident), Candidate(worker=B)], 0)


def test_a_hot_prefix_spreads_when_its_holder_is_busy() -> None:
    """The holder is chosen until its queue costs more than loading elsewhere."""
    made, chosen = policy(WorkerOrder.ARRIVAL), []
    for number in range(6):
        holder = Candidate(worker=A, resident_tokens=9000)
        other = Candidate(worker=B, pool=(Source(Tier.DRAM, False, 9000),))
        ask = Ask(f"h{number}", 10_000)
        ranking = made.rank(ask, [holder, other], 0)
        assert ranking is not None
        made.routed(ask, ranking.best, 0)
        chosen.append(ranking.best.worker.id)
    assert chosen[0] == "aa"
    assert {"aa", "bb"} == set(chosen)


def test_decode_worker_is_ranked_by_when_the_answer_would_be_complete() -> None:
    """KV in use makes every step longer, which counts for each token and for each of the others."""
    made = policy()
    for tokens in range(0, 400_000, 10_000):
        made.estimate.stepped(tokens, int((0.02 + tokens * 1e-7) * SECOND))
    ask = Ask("r", 1000, output_tokens=100)
    idle = Candidate(worker=WorkerRef("decode", "i", 1), resident_tokens=1000)
    busy = Candidate(worker=WorkerRef("decode", "b", 1), resident_tokens=1000, decode_tokens=200_000, active=9)
    ranking = made.rank(ask, [busy, idle], 0)
    assert ranking is not None
    assert ranking.best.worker.id == "i"
    assert terms(ranking.scored[1])["steps"] == pytest.approx(4.0, rel=0.1)


@settings(max_examples=80, deadline=None)
@given(
    order=st.sampled_from(list(WorkerOrder)),
    others=st.lists(st.integers(1, 60_000), max_size=5),
    prompt=st.integers(2, 60_000),
    held=st.integers(0, 60_000),
    free=st.integers(0, 60_000),
    at=st.integers(0, 10**10),
    change=st.sampled_from(["prompt", "held", "free", "time", "price", "share"]),
)
def test_a_small_change_of_anything_changes_no_cost_by_a_jump(
    order: WorkerOrder, others: list[int], prompt: int, held: int, free: int, at: int, change: str
) -> None:
    """A token or a millisecond more is worth at most what it costs everybody: there is no threshold."""
    made = policy(order)
    for number, tokens in enumerate(others):
        made.routed(Ask(f"q{number}", tokens), Scored(Candidate(worker=A), 0, (), 0, tokens), 0)

    def cost(prompt: int, held: int, free: int, at: int, price_s: float, share: float) -> float:
        pool = (Source(Tier.DRAM, False, held // 2), Source(Tier.SSD, True, held - held // 2)) if held > 1 else ()
        candidate = Candidate(worker=A, pool=pool, free_tokens=free, price_s=price_s)
        return score(made, Ask("r", prompt, tenant_share=share), candidate, at).cost

    before = cost(prompt, held, free, at, 1e-6, 1.5)
    after = cost(
        prompt + (change == "prompt"),
        held + (change == "held"),
        free + (change == "free"),
        at + 10**6 * (change == "time"),
        1e-6 + 1e-9 * (change == "price"),
        1.5 + 1e-4 * (change == "share"),
    )
    assert abs(after - before) <= 0.01 * (len(others) + 1)


def test_decode_worker_helps_only_where_the_request_would_wait() -> None:
    """Idle prefill workers get it, however idle decode workers are; behind a long prompt one helps, unless it has shown to be too slow."""
    made, decode = policy(WorkerOrder.ARRIVAL), WorkerRef("decode", "dd", 1)
    candidates, helpers = [Candidate(worker=A), Candidate(worker=B)], [Candidate(worker=decode)]

    def best() -> WorkerRef:
        ranking = made.rank_with_help(Ask("r", 2000), candidates, helpers, 0)
        assert ranking is not None
        return ranking.best.worker

    assert best() != decode
    for worker in (A, B):
        made.routed(Ask(worker.id, 10_000), Scored(Candidate(worker=worker), 0, (), 0, 10_000), 0)
    assert best() == decode
    for number in range(40):
        made.first_token(f"d{number}", decode, Observed(computed_tokens=2000, compute_ns=20 * SECOND // 10), 0)
    assert best() != decode
