"""Who rests, who is slow, who is probed: decided by times that are arguments."""

import pytest

from kvpool.client.health import ILL_REST_NS, LONGEST_REST_NS, PATIENCE_NS, REST_NS, STRIKES, WINDOW_NS, Health
from kvpool.units import MS, SECOND


def fall_ill(health: Health[str], now_ns: int = 0) -> int:
    """Let "n" fail as often in a row as it takes; the time of the last failure."""
    for _ in range(STRIKES - 1):
        health.failed("n", "control", now_ns)
        now_ns += REST_NS
    health.failed("n", "control", now_ns)
    return now_ns


def test_failed_node_rests_for_a_moment() -> None:
    """One failure is worth a second of peace, no probe and no report."""
    health = Health[str]()
    health.failed("n", "control", 10)
    assert health.resting("n", 10 + REST_NS - 1)
    assert not health.resting("n", 10 + REST_NS)
    assert not health.resting("other", 10)
    assert health.ill() == []


def test_calls_that_fail_together_are_one_failure() -> None:
    """Ten requests under way when a node dies don't make it ten times as dead."""
    health = Health[str]()
    for _ in range(10):
        health.failed("n", "control", 5)
    assert health.ill() == []
    assert not health.resting("n", 5 + REST_NS)


def test_third_failure_in_a_row_needs_a_probe() -> None:
    """Whoever keeps failing isn't asked again because time has passed."""
    health = Health[str]()
    now_ns = fall_ill(health)
    assert health.ill() == ["n"]
    assert health.to_probe(now_ns + ILL_REST_NS - 1) == []
    assert health.to_probe(now_ns + ILL_REST_NS) == ["n"]
    assert health.resting("n", now_ns + 1000 * SECOND)
    health.probed("n")
    assert not health.resting("n", now_ns + ILL_REST_NS)
    assert health.ill() == []


@pytest.mark.parametrize("probed", [False, True])
def test_rest_doubles_with_each_further_failure_up_to_a_limit(probed: bool) -> None:
    """Whether the probe itself fails, or what comes after it: a node that stays broken costs less and less."""
    health = Health[str]()
    now_ns, rest_ns = fall_ill(health), ILL_REST_NS
    for _ in range(12):
        now_ns += rest_ns
        assert health.to_probe(now_ns) == ["n"]
        if probed:
            health.probed("n")
        health.failed("n", "control", now_ns)
        rest_ns = min(2 * rest_ns, LONGEST_REST_NS)
        assert health.to_probe(now_ns + rest_ns - 1) == []
    assert rest_ns == LONGEST_REST_NS


def test_answer_forgets_the_failures_before_it() -> None:
    """Only failures in a row count."""
    health = Health[str]()
    fall_ill(health)
    health.end("n", health.begin("n", 0), MS, answered=True)
    assert health.ill() == []
    health.failed("n", "control", 100 * SECOND)
    assert health.ill() == []
    assert not health.resting("n", 100 * SECOND + REST_NS)


def test_answers_don_t_hide_that_no_bytes_move() -> None:
    """A node that grants every lease and delivers nothing is as bad as a dead one."""
    health, now_ns = Health[str](), 0
    for _ in range(STRIKES):
        health.end("n", health.begin("n", now_ns), now_ns + MS, answered=True)
        health.failed("n", "data", now_ns)
        now_ns += REST_NS
    assert health.ill() == ["n"]
    health.well("n", "data")
    assert health.ill() == []


def test_caller_in_a_hurry_makes_no_node_ill() -> None:
    """It rests, so that not everybody waits for it, but no number of such calls needs a probe or a report."""
    health, now_ns = Health[str](), 0
    for _ in range(3 * STRIKES):
        health.late("n", now_ns)
        assert health.resting("n", now_ns + REST_NS - 1)
        now_ns += REST_NS
    assert health.ill() == []
    assert not health.resting("n", now_ns)


def test_failures_far_apart_are_not_in_a_row() -> None:
    """One lost packet an hour is nobody's illness."""
    health, now_ns = Health[str](), 0
    for _ in range(2 * STRIKES):
        health.failed("n", "control", now_ns)
        now_ns += REST_NS + WINDOW_NS + 1
    assert health.ill() == []


def test_call_is_overdue_after_three_times_the_usual() -> None:
    """A slow node has longer, a quick one at least 50 ms, and no call is overdue that has ended."""
    health = Health[str]()
    assert health.patience_ns("n") == PATIENCE_NS
    health.end("n", health.begin("n", 0), SECOND, answered=True)
    assert health.patience_ns("n") == 3 * SECOND
    first, second = health.begin("n", 0), health.begin("n", 2 * SECOND)
    assert not health.overdue("n", 3 * SECOND)
    assert health.overdue("n", 3 * SECOND + 1)
    health.end("n", first, 4 * SECOND, answered=False)
    assert not health.overdue("n", 4 * SECOND)
    health.end("n", second, 5 * SECOND, answered=False)
    assert not health.overdue("n", 100 * SECOND)
    assert health.patience_ns("n") == 3 * SECOND


def test_patience_follows_the_load() -> None:
    """What is usual changes slowly; one fast answer doesn't make the next one late."""
    health = Health[str]()
    health.end("n", health.begin("n", 0), SECOND, answered=True)
    for _ in range(100):
        before = health.patience_ns("n")
        health.end("n", health.begin("n", 0), MS, answered=True)
        assert PATIENCE_NS <= health.patience_ns("n") <= before
    assert health.patience_ns("n") == PATIENCE_NS


def test_nodes_that_left_are_forgotten_once_their_calls_have_ended() -> None:
    """The books hold no more than the view, and an answer from the past breaks nothing."""
    health = Health[str]()
    fall_ill(health)
    health.failed("m", "control", 0)
    call = health.begin("m", 0)
    health.keep_only(set())
    assert health.ill() == []
    assert health.resting("m", 0)
    health.end("m", call, 1, answered=False)
    health.keep_only(set())
    assert not health.resting("m", 0)
    health.end("m", call, 1, answered=True)
    health.well("m", "data")
    health.probed("m")
    assert health.patience_ns("m") == PATIENCE_NS
