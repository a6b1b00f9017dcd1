"""StreamingLLM: sinks and a window, and where the sinks are read."""

import pytest
import torch

from kvpool.engine.attention.rotation import moved
from kvpool.engine.attention.settings import StreamingSettings
from kvpool.engine.attention.streaming import Streaming
from kvpool.errors import LocalError


def settled(prompt: int, **changes: object) -> Streaming:
    streaming = Streaming(StreamingSettings(**changes))  # type: ignore[arg-type]
    streaming.settle(prompt)
    return streaming


def test_keep_is_sinks_and_the_most_recent() -> None:
    """The window slides as tokens come, the sinks stay, the budget is constant."""
    streaming = settled(40, budget=0.2, sinks=2)
    for past, expected in ((40, [0, 1, 34, 35, 36, 37, 38, 39]), (41, [0, 1, 35, 36, 37, 38, 39, 40])):
        ids = streaming.keep(0, past).ids
        assert ids is not None
        assert ids.tolist() == [expected]


def test_keep_reads_everything_while_it_fits() -> None:
    """Nothing left out, nothing tainted."""
    streaming = settled(40, budget=41)
    assert streaming.keep(0, 41).ids is None
    assert streaming.keep(0, 42).ids is not None


def test_sinks_are_read_right_before_the_window() -> None:
    """Positions count within the cache: 992 left out moves the sinks by 992, and by nothing when positions are the text's."""
    selection = settled(1000, budget=8).keep(0, 1000)
    assert (selection.moved, selection.by) == (4, 992)
    assert settled(1000, budget=8, positions="original").keep(0, 1000).by == 0


def test_a_budget_below_the_sinks_still_has_a_recent_token() -> None:
    """A share of a short prompt may round to nothing."""
    ids = settled(8, budget=0.1).keep(0, 8).ids
    assert ids is not None
    assert ids.tolist() == [[0, 1, 2, 3, 7]]


def test_keep_before_the_prompt_is_over_is_an_error() -> None:
    """A budget that is a share of the prompt isn't known yet."""
    with pytest.raises(LocalError, match="settle"):
        Streaming(StreamingSettings()).keep(0, 10)


def test_moved_rotates_as_the_model_would_have() -> None:
    """R(a) R(b) = R(a + b) at any distance, channels beyond the rotated ones untouched."""
    frequencies = 1e4 ** (-torch.arange(0, 8, 2) / 8)
    raw = torch.randn(3, 10)
    at = {position: moved(raw, position, frequencies) for position in (7, 100_007)}
    assert torch.allclose(moved(at[7], 100_000, frequencies), at[100_007], atol=1e-6)
    first, second = raw[:, 0], raw[:, 4]
    turn = torch.tensor(7.0)  # the first frequency is 1
    assert torch.allclose(at[7][:, 0], first * turn.cos() - second * turn.sin(), atol=1e-6)
    assert torch.equal(at[7][:, 8:], raw[:, 8:])
