"""Early rejection by the load of now and by the load foreseen."""

import pytest

from kvpool.policy.admission.early import EarlyRejection, Rejection
from kvpool.units import SECOND


def test_none_lets_everybody_begin_and_wastes_what_finds_no_room() -> None:
    """Without early rejection the last check is the only one."""
    admission = EarlyRejection(Rejection.NONE, 100)
    assert admission.ask(80, 0, 0).accepted
    assert admission.prefilled("a", 80, 0)
    assert admission.ask(80, 0, 0).accepted
    assert not admission.prefilled("b", 80, 0)
    assert admission.load() == pytest.approx(0.8)


def test_early_looks_at_now_and_predicted_at_the_end_of_the_prefill() -> None:
    """An empty decode with 90 tokens coming: early lets 20 more in, prediction doesn't, unless they come much later."""
    for mode, ready_s, accepted in ((Rejection.EARLY, 6, True), (Rejection.PREDICTED, 6, False), (Rejection.PREDICTED, 60, True)):
        admission = EarlyRejection(mode, 100)
        admission.coming("a", 90, 5 * SECOND)
        verdict = admission.ask(20, ready_s * SECOND, 0)
        assert verdict.accepted is accepted
        assert (verdict.retry_after_s >= 1) is not accepted


def test_prediction_lets_in_what_will_find_room_when_early_does_not() -> None:
    """A full decode whose requests will have ended by then."""
    for mode, accepted in ((Rejection.EARLY, False), (Rejection.PREDICTED, True)):
        admission = EarlyRejection(mode, 100)
        assert admission.prefilled("a", 100, 0)
        assert admission.ask(50, 30 * SECOND, 0).accepted is accepted


def test_who_is_late_is_expected_as_late_again() -> None:
    """Due at 5 s and not there at 8: expected at 11, and not counted before."""
    admission = EarlyRejection(Rejection.PREDICTED, 100)
    admission.coming("a", 90, 5 * SECOND)
    assert admission.predicted(10 * SECOND, 8 * SECOND) == 0
    assert admission.predicted(11 * SECOND, 8 * SECOND) == pytest.approx(0.9)


def test_decode_time_is_learnt_and_ends_are_counted_once() -> None:
    """t_d follows what ended; nothing stays behind."""
    admission = EarlyRejection(Rejection.PREDICTED, 100)
    for number in range(300):
        assert admission.prefilled(str(number), 50, number * SECOND)
        admission.ended(str(number), number * SECOND + 2 * SECOND)
        admission.ended(str(number), number * SECOND + 3 * SECOND)
    assert admission.load() == 0
    assert admission.decode_s == pytest.approx(2.0, rel=0.1)


def test_limits_must_be_positive() -> None:
    """A capacity of nothing would divide by nothing."""
    with pytest.raises(ValueError, match="positive"):
        EarlyRejection(Rejection.EARLY, 0)
