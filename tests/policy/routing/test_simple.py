"""Policies that look at little: random, round robin, least loaded, power of two, session affinity."""

from collections import Counter

from kvpool.policy.routing import Ask, Candidate, Policy, WorkerRef, make_policy


def workers(*active: int) -> list[Candidate]:
    return [Candidate(worker=WorkerRef("prefill", f"{index:02d}", 1), active=busy) for index, busy in enumerate(active)]


def chosen(policy: Policy, candidates: list[Candidate], session: str = "") -> str:
    ask = Ask("r", 100, session=session)
    ranking = policy.rank(ask, candidates, 0)
    assert ranking is not None
    policy.routed(ask, ranking.best, 0)
    return ranking.best.worker.id


def test_random_sends_everybody_about_the_same() -> None:
    """Each worker is as likely as any other."""
    policy, candidates = make_policy("random", 3), workers(0, 9, 0, 0)
    counts = Counter(chosen(policy, candidates) for _ in range(4000))
    assert all(900 < count < 1100 for count in counts.values())


def test_round_robin_goes_round_over_those_that_are_there() -> None:
    """A worker that left is passed over, and the turn goes on behind it."""
    policy, candidates = make_policy("round_robin"), workers(5, 0, 0)
    assert [chosen(policy, candidates) for _ in range(4)] == ["00", "01", "02", "00"]
    assert chosen(policy, [candidates[0], candidates[2]]) == "02"


def test_least_loaded_takes_the_idlest_and_goes_round_among_equals() -> None:
    """Load comes first; an idle cluster is used evenly."""
    policy = make_policy("least_loaded")
    assert chosen(policy, workers(3, 1, 2)) == "01"
    assert [chosen(policy, workers(0, 0, 0)) for _ in range(3)] == ["02", "00", "01"]


def test_power_of_two_never_takes_the_busiest_and_not_always_the_idlest() -> None:
    """Two are drawn and the busier one loses."""
    policy = make_policy("power_of_two", 1)
    counts = Counter(chosen(policy, workers(0, 1, 2, 3)) for _ in range(600))
    assert "03" not in counts
    assert 250 < counts["00"] < 350
    assert counts["01"] > counts["02"] > 0


def test_session_stays_when_load_changes_and_moves_only_when_its_worker_goes() -> None:
    """Rendezvous hashing: a worker that leaves moves its own sessions only."""
    policy = make_policy("session_affinity")
    sessions = [f"s{number}" for number in range(60)]
    before = {session: chosen(policy, workers(0, 0, 0), session) for session in sessions}
    assert before == {session: chosen(policy, workers(9, 0, 4), session) for session in sessions}
    after = {session: chosen(policy, workers(0, 0, 0)[:2], session) for session in sessions}
    assert all(after[session] == home for session, home in before.items() if home != "02")
    assert len(set(before.values())) == 3


def test_request_without_session_goes_to_the_idlest() -> None:
    """There is nothing to be true to."""
    assert chosen(make_policy("session_affinity"), workers(3, 1, 2)) == "01"
