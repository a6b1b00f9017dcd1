"""AIBrix's documented thresholds."""

from kvpool.policy.routing import Ask, Candidate, Source, Tier, WorkerRef
from kvpool.policy.routing.aibrix import AibrixPrefixCache


def worker(index: int, active: int, held: int) -> Candidate:
    pool = (Source(Tier.DRAM, True, held),) if held else ()
    return Candidate(worker=WorkerRef("prefill", f"{index:02d}", 1), active=active, pool=pool)


def choice(policy: AibrixPrefixCache, *candidates: Candidate) -> str:
    ranking = policy.rank(Ask("r", 1000), candidates, 0)
    assert ranking is not None
    return ranking.best.worker.id


def test_even_load_takes_the_longest_match() -> None:
    """Below the thresholds the cache decides, not a request more or less."""
    assert choice(AibrixPrefixCache(), worker(0, 2, 900), worker(1, 2, 400), worker(2, 1, 0)) == "00"


def test_uneven_load_ignores_the_match_from_the_threshold_on() -> None:
    """A difference of 8 is still even, of 9 is not: the documented cliff."""
    policy = AibrixPrefixCache(deviations=2.0)
    assert choice(policy, worker(0, 8, 900), worker(1, 0, 0)) == "00"
    assert choice(policy, worker(0, 9, 900), worker(1, 0, 0)) == "01"
    assert choice(AibrixPrefixCache(imbalance=16, deviations=2.0), worker(0, 9, 900), worker(1, 0, 0)) == "00"


def test_holder_above_mean_and_deviation_is_passed_over() -> None:
    """mean 2, deviation 2.4: a holder with 6 is too busy at one deviation, not at two."""
    cluster = [worker(0, 6, 900), worker(1, 2, 500), worker(2, 0, 0), worker(3, 0, 0)]
    assert choice(AibrixPrefixCache(), *cluster) == "01"
    assert choice(AibrixPrefixCache(deviations=2.0), *cluster) == "00"


def test_equal_matches_go_to_the_idler_and_no_match_to_the_idlest() -> None:
    """Order: match, then running requests."""
    assert choice(AibrixPrefixCache(), worker(0, 2, 500), worker(1, 1, 500)) == "01"
    assert choice(AibrixPrefixCache(), worker(0, 2, 0), worker(1, 1, 0)) == "01"
