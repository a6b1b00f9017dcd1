"""What a worker may be given before it has shown that it works."""

from kvpool.policy.admission.trust import FULL, MAX_REST_NS, REST_NS, START, Trust


def test_new_worker_gets_some_and_earns_more() -> None:
    """A burst must not all go to the one that has just come and is idle."""
    trust = Trust()
    assert trust.left(0) == START
    assert trust.left(START) == trust.left(START + 1) == 0
    for _ in range(10):
        trust.answered()
    assert trust.allowed == FULL
    assert trust.left(10_000) == FULL


def test_failed_worker_rests_then_gets_one_at_a_time() -> None:
    """Failing fast must not attract load: an idle worker that failed gets one try after each rest."""
    trust = Trust()
    trust.failed(0)
    assert trust.rests(REST_NS - 1)
    assert not trust.rests(REST_NS)
    assert (trust.left(0), trust.left(1)) == (1, 0)


def test_rests_grow_up_to_a_limit_and_end_with_an_answer() -> None:
    """A worker that always fails is tried less and less; one that recovered is trusted again."""
    trust, now_ns, rests = Trust(), 0, []
    for _ in range(8):
        trust.failed(now_ns)
        rests.append(trust.rests_until_ns - now_ns)
        now_ns = trust.rests_until_ns
    assert rests[:3] == [REST_NS, 2 * REST_NS, 4 * REST_NS]
    assert rests[-1] == MAX_REST_NS
    trust.answered()
    assert (trust.left(0), trust.rests(now_ns)) == (START, False)
    trust.failed(now_ns)
    assert trust.rests_until_ns - now_ns == REST_NS


def test_requests_sent_before_the_failure_say_nothing_new() -> None:
    """Fifty that break with one connection are one failure."""
    trust = Trust()
    for _ in range(50):
        trust.failed(1)
    assert trust.failures == 1
