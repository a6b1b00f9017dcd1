"""Stop strings are found wherever pieces end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.stops import StopScanner


def _run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    scanner = StopScanner(stops)
    shown = "".join(scanner.push(piece) for piece in pieces)
    return shown + ("" if scanner.stopped else scanner.finish()), scanner.stopped


def _reference(stops: list[str], text: str) -> tuple[str, bool]:
    """The text before the stop string that is complete first, reading character by character."""
    for end in range(1, len(text) + 1):
        found = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        if found:
            return text[: min(found)], True
    return text, False


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3), st.lists(st.text(alphabet="ab", max_size=3), max_size=12))
def test_scan_of_any_pieces_never_shows_what_a_stop_string_covers(stops: list[str], pieces: list[str]) -> None:
    """The answer is the text before the first stop string, and stopping is noticed exactly when there is one."""
    shown, stopped = _run(stops, pieces)
    text = "".join(pieces)
    assert stopped == any(stop in text for stop in stops)
    if stopped:
        assert text.startswith(shown)
        assert not any(stop in shown for stop in stops)
        assert any(text.startswith(shown + stop) for stop in stops)
    else:
        assert shown == text


@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3), st.text(alphabet="ab", max_size=20))
def test_scan_of_single_characters_stops_at_the_first_complete_stop_string(stops: list[str], text: str) -> None:
    """Fed one character at a time the cut is where a reader with all the time in the world would cut."""
    assert _run(stops, list(text)) == _reference(stops, text)


@pytest.mark.parametrize(
    ("pieces", "shown", "stopped"),
    [
        (["one ST", "OP two"], "one ", True),
        (["one STOP"], "one ", True),
        (["STOP"], "", True),
        (["one ", "S", "T", "O", "P"], "one ", True),
        (["one ST", "UP"], "one STUP", False),
        (["one ST"], "one ST", False),
        (["SSTOP"], "S", True),
    ],
)
def test_stop_string_over_pieces_cuts_before_it(pieces: list[str], shown: str, stopped: bool) -> None:
    """Tokens don't respect stop strings: at a boundary, over several, at the end, and almost."""
    assert _run(["STOP"], pieces) == (shown, stopped)


def test_text_that_may_still_become_a_stop_string_is_held_back() -> None:
    """What was shown can't be taken back, so a possible beginning waits."""
    scanner = StopScanner(["END"])
    assert scanner.push("abcE") == "abc"
    assert scanner.push("N") == ""
    assert scanner.push("x") == "ENx"


def test_text_after_a_stop_string_is_dropped() -> None:
    """A worker may have sent more before it heard of the end."""
    scanner = StopScanner(["."])
    assert scanner.push("a. b") == "a"
    assert scanner.push("more") == ""


def test_empty_stop_string_is_refused() -> None:
    """It would match before the first character."""
    with pytest.raises(ValueError, match="empty"):
        StopScanner([""])
