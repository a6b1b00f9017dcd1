"""The choice is a pure function with reasons."""

from hypothesis import given
from hypothesis import strategies as st

from kvpool.policy.routing import WorkerRef
from router.policy import Candidate, choose


def _ref(number: int) -> WorkerRef:
    return WorkerRef("prefill", f"{number:032x}", 1)


def _chosen(*candidates: Candidate, prompt: int = 1000) -> WorkerRef:
    choice = choose(candidates, prompt_tokens=prompt)
    assert choice is not None
    return choice.worker


def test_longest_resident_match_wins_among_the_idle() -> None:
    """That is what a prefix-aware router is for."""
    assert _chosen(Candidate(worker=_ref(1), resident_tokens=100), Candidate(worker=_ref(2), resident_tokens=900)) == _ref(2)


def test_resident_match_loses_to_an_idle_worker_when_others_queue_for_it() -> None:
    """A hot prefix must not turn into a hot spot."""
    hot = Candidate(worker=_ref(1), resident_tokens=900, active=3, backlog_tokens=1500)
    assert _chosen(hot, Candidate(worker=_ref(2))) == _ref(2)


def test_resident_match_is_worth_little_when_the_pool_holds_the_same() -> None:
    """Loading is far cheaper than computing, so load decides."""
    busy = Candidate(worker=_ref(1), resident_tokens=960, pool_tokens=960, active=4)
    assert _chosen(busy, Candidate(worker=_ref(2), pool_tokens=960)) == _ref(2)
    assert _chosen(busy, Candidate(worker=_ref(2))) == _ref(1)


def test_equal_candidates_are_decided_by_load_then_by_id() -> None:
    """Equal inputs must give equal choices, in any order."""
    one, two, three = (Candidate(worker=_ref(n)) for n in (1, 2, 3))
    assert _chosen(three, two, one) == _ref(1)
    busy = Candidate(worker=_ref(1), active=1)
    assert _chosen(three, two, busy) == _ref(2)


def test_suspect_is_taken_only_when_there_is_nobody_else() -> None:
    """It failed a moment ago; a cold worker is the safer bet."""
    suspect = Candidate(worker=_ref(1), resident_tokens=1000, suspect=True)
    assert _chosen(suspect, Candidate(worker=_ref(2), active=9)) == _ref(2)
    assert _chosen(suspect) == _ref(1)


def test_planned_worker_is_kept_while_it_costs_little_more() -> None:
    """The blocks are on their way to it; but neither a queue there nor a failure is worth that."""
    best = Candidate(worker=_ref(1), pool_tokens=1000)
    for planned, taken in [
        (Candidate(worker=_ref(2), pool_tokens=1000, active=2), 2),
        (Candidate(worker=_ref(2), pool_tokens=1000, active=3), 1),
        (Candidate(worker=_ref(2), pool_tokens=1000, suspect=True), 1),
        (Candidate(worker=_ref(3), pool_tokens=1000), 1),
    ]:
        choice = choose([planned, best], prompt_tokens=1000, keep=_ref(2))
        assert choice is not None
        assert choice.worker == _ref(taken)
        assert choice.ranking[0].candidate == best
        assert ("; kept 00000000" in choice.explain()) == (taken == 2)
    alone = choose([Candidate(worker=_ref(2), suspect=True)], prompt_tokens=1000, keep=_ref(2))
    assert alone is not None
    assert alone.worker == _ref(2)


def test_no_candidates_give_no_choice() -> None:
    """Nobody alive is a value, not an error."""
    assert choose([], prompt_tokens=10) is None


def test_explanation_names_every_candidate_and_its_cost() -> None:
    """`kvpool explain` and the debug log show why."""
    choice = choose([Candidate(worker=_ref(1), resident_tokens=40, pool_tokens=60), Candidate(worker=_ref(2))], prompt_tokens=100)
    assert choice is not None
    text = choice.explain()
    assert text.startswith("00000000 cost 42.0 = backlog 0 + 32 x 0 active + 0.1 x 20 to fetch + 40 to compute")
    assert "cost 100.0" in text


_candidates = st.lists(
    st.builds(
        Candidate,
        worker=st.integers(0, 50).map(_ref),
        resident_tokens=st.integers(0, 2000),
        pool_tokens=st.integers(0, 2000),
        active=st.integers(0, 50),
        backlog_tokens=st.integers(0, 5000),
        suspect=st.booleans(),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda candidate: candidate.worker,
)


@given(_candidates, st.integers(1, 1500))
def test_choice_is_the_cheapest_and_does_not_depend_on_order(candidates: list[Candidate], prompt: int) -> None:
    """Every prompt token is resident, fetched or computed, once; and no order of listing may sway the choice."""
    choice = choose(candidates, prompt_tokens=prompt)
    assert choice is not None
    assert choice.worker == _chosen(*reversed(candidates), prompt=prompt)
    best = choice.ranking[0]
    for scored in choice.ranking:
        resident = prompt - scored.fetch_tokens - scored.compute_tokens
        assert resident == min(prompt, scored.candidate.resident_tokens)
        assert min(scored.fetch_tokens, scored.compute_tokens) >= 0
        assert (best.candidate.suspect, best.cost) <= (scored.candidate.suspect, scored.cost)
