"""What holds for every routing policy, whichever name it has."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import ConfigError
from kvpool.policy.routing import POLICIES, Ask, Candidate, Load, Observed, Ranking, Source, Tier, WorkerRef, make_policy

SOURCES = st.builds(Source, st.sampled_from(list(Tier)), st.booleans(), st.integers(1, 4000), st.floats(0, 2))


def candidate(index: int, drawn: tuple[int, list[Source], int, int, bool]) -> Candidate:
    resident, pool, active, backlog, suspect = drawn
    return Candidate(
        worker=WorkerRef("prefill", f"{index:02d}", 1),
        resident_tokens=resident,
        pool=tuple(pool),
        active=active,
        backlog_tokens=backlog,
        suspect=suspect,
    )


CANDIDATES = st.lists(
    st.tuples(st.integers(0, 4000), st.lists(SOURCES, max_size=3), st.integers(0, 30), st.integers(0, 50_000), st.booleans()),
    min_size=1,
    max_size=8,
).map(lambda drawn: [candidate(index, each) for index, each in enumerate(drawn)])
PROMPTS = st.lists(st.integers(1, 20_000), min_size=1, max_size=6)


def rankings(name: str, candidates: list[Candidate], prompts: list[int]) -> list[Ranking]:
    """The rankings of some requests one after the other, with the notices between them."""
    policy, found = make_policy(name, 7), []
    for number, prompt in enumerate(prompts):
        ask = Ask(request_id=str(number), prompt_tokens=prompt, output_tokens=9, session=f"s{number % 2}")
        ranking = policy.rank(ask, candidates, number * 10**8)
        assert ranking is not None
        policy.routed(ask, ranking.best, number * 10**8)
        loads = (Load(Tier.DRAM, False, 100, 10**6),)
        if number % 2:
            observed = Observed(loads=loads, computed_tokens=prompt, compute_ns=prompt * 10**5)
            policy.first_token(str(number - 1), ranking.best.worker, observed, number * 10**8 + 1)
        found.append(ranking)
    return found


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=25, deadline=None)
@given(candidates=CANDIDATES, prompts=PROMPTS)
def test_policy_ranks_everybody_once_suspects_last_and_always_alike(name: str, candidates: list[Candidate], prompts: list[int]) -> None:
    """Equal calls give equal answers, nobody is lost, no suspect is chosen while a healthy worker is there, and tokens add up."""
    found = rankings(name, candidates, prompts)
    assert found == rankings(name, candidates, prompts)
    for ranking, prompt in zip(found, prompts, strict=True):
        assert sorted(scored.worker for scored in ranking.scored) == [c.worker for c in candidates]
        suspects = [scored.candidate.suspect for scored in ranking.scored]
        if name != "power_of_two":  # those that were not drawn follow by load
            assert suspects == sorted(suspects)
        assert suspects[0] <= min(suspects)
        for scored in ranking.scored:
            assert 0 <= scored.compute_tokens <= prompt
            resident = min(scored.candidate.resident_tokens, prompt)
            assert 0 <= scored.fetch_tokens <= max(0, scored.candidate.held_tokens - resident)


@pytest.mark.parametrize("name", POLICIES)
def test_policy_without_candidates_has_no_ranking(name: str) -> None:
    """There is nobody to choose; that is a value and no error."""
    assert make_policy(name).rank(Ask("r", 10), [], 0) is None


@pytest.mark.parametrize("name", POLICIES)
def test_policy_explains_each_candidate_in_one_line(name: str) -> None:
    """Whoever prints a ranking needs no knowledge of the policy."""
    policy = make_policy(name)
    ranking = policy.rank(Ask("r", 100, session="s"), [candidate(0, (50, [], 1, 0, False)), candidate(1, (0, [], 0, 0, True))], 0)
    assert ranking is not None
    text = ranking.explain()
    assert text.startswith(f"{policy.name}: ")
    assert text.count(" = ") == 2
    assert text.count("(suspect)") == 1


@pytest.mark.parametrize("name", POLICIES)
def test_policy_forgets_a_worker_that_is_gone(name: str) -> None:
    """Notices about the dead come late; they must do no harm."""
    policy, worker = make_policy(name), candidate(0, (0, [], 0, 0, False))
    ask = Ask("r", 100)
    ranking = policy.rank(ask, [worker], 0)
    assert ranking is not None
    policy.routed(ask, ranking.best, 0)
    policy.forget(worker.worker)
    policy.ended("r", worker.worker, 5)
    policy.first_token("r", worker.worker, Observed(computed_tokens=100, compute_ns=10**7), 6)
    assert policy.rank(Ask("q", 100), [worker], 10) is not None


def test_make_policy_refuses_an_unknown_name() -> None:
    """A typing error must not become some default."""
    with pytest.raises(ConfigError, match="least_loaded"):
        make_policy("fastest")
