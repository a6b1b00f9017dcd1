"""Counts that can be added, and what is said of them."""

from kvpool.connectors.vllm.messages import StepReport
from kvpool.connectors.vllm.stats import COUNTS, Tally, added, summary


def test_counts_add_up_and_gauges_are_the_latest() -> None:
    """Of ranks, steps and minutes."""
    tally = Tally()
    tally.add("loads")
    tally.add("loads", 2)
    tally.add("held_blocks", 7)
    tally.add("held_blocks", 3)
    first = tally.take()
    assert first == {"loads": 3, "held_blocks": 3}
    assert tally.take() == {}
    assert added(first, {"loads": 1, "held_blocks": 0, "saves": 2}) == {"loads": 4, "held_blocks": 0, "saves": 2}
    assert set(first) <= set(COUNTS)


def test_summary_is_rates_of_the_interval() -> None:
    """For vLLM's log line."""
    line = summary(
        {
            "load_blocks": 4,
            "load_seconds": 2,
            "load_bytes": 10e6,
            "lookups": 2,
            "lookup_seconds": 0.001,
            "lookup_blocks": 8,
            "found_blocks": 4,
        }
    )
    assert line == {"loaded blocks": 4, "load MB/s": 5.0, "failed blocks": 0, "lookup ms": 0.5, "found of looked up": 0.5}


def test_reports_of_ranks_merge() -> None:
    """Each rank's word on a save counts once; of a load the shortest."""
    one = StepReport(saved={1: [3], 2: [1]}, short={"a": 2}, failed_within=1)
    both = one.merged(StepReport(saved={1: [2]}, short={"a": 1, "b": 0}))
    assert (both.saved, both.short, both.failed_within) == ({1: [3, 2], 2: [1]}, {"a": 1, "b": 0}, 1)
    assert StepReport().empty
    assert not both.empty
