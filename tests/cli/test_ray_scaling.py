"""When a worker group grows and shrinks: pressure and calm must last, and what is loading is waited for."""

import pytest

from kvpool.cli.ray.samples import Sampler, group_sample, mean_since, ttft_totals
from kvpool.cli.ray.scaling import GroupScale, Limits, Rules, Sample
from kvpool.cli.snapshot import Snapshot, WorkerReport
from kvpool.cluster import Member
from kvpool.errors import ConfigError, UnavailableError
from kvpool.request import WorkerStatus

RULES = Rules(requests_each=2, ttft_s=1.0, up_after_s=5, down_after_s=60)


def _scale(wanted: int = 1, *, least: int = 1, most: int = 4, rules: Rules = RULES) -> GroupScale:
    return GroupScale(rules, Limits(least=least, most=most), wanted=wanted)


def _run(scale: GroupScale, times: range, requests: int, *, ttft_s: float | None = None, workers: int | None = None) -> list[int]:
    """The counts while `requests` are there; every wanted worker has arrived unless `workers` says otherwise."""
    return [
        scale.step(Sample(at_s=at_s, workers=scale.wanted if workers is None else workers, requests=requests, ttft_s=ttft_s))
        for at_s in times
    ]


def test_queue_that_lasts_adds_what_the_requests_need() -> None:
    """Seven requests need four workers of two each, but a group at most doubles at a time."""
    assert _run(_scale(), range(0, 14, 2), 7) == [1, 1, 1, 2, 2, 2, 2]
    assert _run(scale := _scale(), range(0, 40, 2), 7)[-1] == 4
    assert scale.wanted == 4


def test_queue_that_passes_adds_nothing() -> None:
    """A burst shorter than `up_after_s` is not worth a worker that takes as long to load."""
    scale = _scale()
    for start in range(0, 60, 6):
        assert set(_run(scale, range(start, start + 4, 2), 9)) == {1}
        assert set(_run(scale, range(start + 4, start + 6, 2), 1)) == {1}


def test_group_stays_within_its_limits() -> None:
    """Never more than the most, never fewer than the least, whatever lasts."""
    assert _run(_scale(most=3), range(0, 200, 2), 99)[-1] == 3
    assert _run(_scale(wanted=3, least=2), range(0, 600, 2), 0)[-1] == 2


def test_workers_that_have_yet_to_arrive_are_waited_for() -> None:
    """The queue can't shrink before the new ones serve: asking for more meanwhile would overshoot."""
    scale = _scale()
    assert _run(scale, range(0, 8, 2), 4)[-1] == 2
    assert set(_run(scale, range(8, 80, 2), 9, workers=1)) == {2}
    assert _run(scale, range(80, 90, 2), 9)[-1] == 4


def test_late_first_tokens_add_a_worker_only_where_requests_wait() -> None:
    """Two requests at one worker delay each other; a long prompt alone does not get faster by another worker."""
    assert _run(_scale(), range(0, 20, 2), 1, ttft_s=9.0)[-1] == 1
    assert _run(_scale(), range(0, 8, 2), 2, ttft_s=9.0)[-1] == 2
    assert _run(_scale(), range(0, 8, 2), 2, ttft_s=0.5)[-1] == 1
    assert _run(_scale(rules=Rules(requests_each=2, ttft_s=None)), range(0, 20, 2), 2, ttft_s=9.0)[-1] == 1


def test_late_first_token_is_remembered_while_nothing_ends() -> None:
    """Slow requests end seldom: no news between two of them is not good news. An empty group has none that is late."""
    scale = _scale()
    _run(scale, range(0, 2, 2), 2, ttft_s=9.0)
    assert _run(scale, range(2, 8, 2), 2)[-1] == 2
    scale = _scale()
    _run(scale, range(0, 2, 2), 2, ttft_s=9.0)
    _run(scale, range(2, 4, 2), 0)
    assert _run(scale, range(4, 30, 2), 2)[-1] == 1


def test_calm_that_lasts_removes_one_at_a_time() -> None:
    """One worker a minute, so that a pause between two bursts costs little."""
    counts = _run(_scale(wanted=3), range(0, 200, 10), 0)
    assert counts[:6] == [3] * 6
    assert counts[6] == 2
    assert counts[7:13] == [2] * 6
    assert counts[-1] == 1


def test_load_between_the_marks_changes_nothing() -> None:
    """Hysteresis: what one worker less could just bear neither grows nor shrinks the group."""
    for requests in (2, 3, 4):
        assert set(_run(_scale(wanted=2), range(0, 600, 2), requests)) == {2}


def test_limits_that_make_no_sense_are_refused() -> None:
    """A group starts within its limits, and they are the right way round."""
    with pytest.raises(ConfigError, match="--min"):
        Limits(least=0, most=1)
    with pytest.raises(ConfigError, match="--min"):
        Limits(least=3, most=2)
    with pytest.raises(ConfigError, match="not within"):
        _scale(wanted=5)


METRICS = """# HELP kvpool_router_time_to_first_token_seconds Seconds
# TYPE kvpool_router_time_to_first_token_seconds histogram
kvpool_router_time_to_first_token_seconds_bucket{le="0.01"} 0.0
kvpool_router_time_to_first_token_seconds_count 4.0
kvpool_router_time_to_first_token_seconds_sum 6.5
kvpool_router_time_to_first_token_seconds_created 1.7e+09
kvpool_router_in_flight 3.0
"""


def test_time_to_first_token_is_read_from_the_routers_exposition() -> None:
    """Sum and count of the histogram, and nothing else that begins alike."""
    assert ttft_totals(METRICS) == (6.5, 4.0)
    assert ttft_totals("") == (0.0, 0.0)


def test_mean_is_of_what_is_new() -> None:
    """A router seen for the first time, or again after a restart, brings no past into the mean."""
    assert mean_since({"a/1": (6.5, 4)}, {"a/1": (8.5, 8)}) == pytest.approx(0.5)
    assert mean_since({"a/1": (6.5, 4)}, {"a/1": (6.5, 4)}) is None
    assert mean_since({"a/1": (6.5, 4)}, {"a/2": (90.0, 9)}) is None
    assert mean_since({"a/1": (1, 1)}, {"a/1": (2, 2), "b/1": (90, 9)}) == pytest.approx(1.0)
    assert mean_since({}, {}) is None


def _worker(role: str, number: int, *, active: int = 0, queued: int = 0, answers: bool = True) -> WorkerReport:
    status = WorkerStatus(
        role=role,
        model="m",
        active_requests=active,
        queued_requests=queued,
        finished_requests=0,
        failed_requests=0,
        prefill_tokens_per_s=0.0,
        resident_tokens=0,
        reaches={},
    )
    member = Member(role=role, id=f"{number:032x}", incarnation=1, address="127.0.0.1:1")
    return WorkerReport(member=member, status=status if answers else None, error="" if answers else "no answer")


def test_sample_of_a_group_adds_up_those_who_answer() -> None:
    """A worker that is silent is one that has yet to arrive; other roles don't count."""
    workers = (
        _worker("decode", 1, active=2, queued=3),
        _worker("decode", 2, active=1),
        _worker("decode", 3, answers=False),
        _worker("prefill", 4, active=9),
    )
    snapshot = Snapshot(nodes=(), workers=workers, routers=())
    assert group_sample(snapshot, "decode", at_s=7.0, ttft_s=0.5) == Sample(at_s=7.0, workers=2, requests=6, ttft_s=0.5)


def test_sampler_tells_what_is_new_since_the_last_look() -> None:
    """The routers' totals grow for ever; a router that does not answer for a while is no reason to fail, or to count twice."""
    router = Member(role="router", id="0" * 32, incarnation=1, address="127.0.0.1:2", info={"url": "http://r"})
    answers = {"sum": 6.5, "count": 4.0}
    asked: list[str] = []

    def get(url: str) -> str:
        asked.append(url)
        if not answers:
            raise UnavailableError("gone")
        return "".join(f"kvpool_router_time_to_first_token_seconds_{name} {value}\n" for name, value in answers.items())

    sampler = Sampler(get)
    assert sampler.sample((router,), ("prefill",))["prefill"].ttft_s is None
    answers = {"sum": 8.5, "count": 8.0}
    sample = sampler.sample((router,), ("prefill", "decode"))
    assert {role: one.ttft_s for role, one in sample.items()} == {"prefill": 0.5, "decode": 0.5}
    assert (sample["prefill"].workers, sample["prefill"].requests) == (0, 0)
    answers = {}
    assert sampler.sample((router,), ("prefill",))["prefill"].ttft_s is None
    answers = {"sum": 99.0, "count": 10.0}
    assert sampler.sample((router,), ("prefill",))["prefill"].ttft_s is None
    assert asked == ["http://r/metrics"] * 4
