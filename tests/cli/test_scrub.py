"""The scrub loop: every step counted, no faster than asked, and an end whatever the node says."""

import time
from collections.abc import Iterator
from typing import cast

import pytest

from kvpool.cli.scrub import STEP_BYTES, Tally, pause_s, scrub, step_bytes
from kvpool.errors import DeadlineError, ProtocolError
from kvpool.request.admin import MAX_CORRUPT_KEYS, VerifyReport
from kvpool.units import GIB, MIB, SECOND
from kvpool.wire.admin_client import AdminRpc

KEY = b"\x01" * 32


class Script:
    """Answers of a node, one a step; remembers what it was asked."""

    address = "here"

    def __init__(self, *steps: VerifyReport | Exception) -> None:
        self._steps: Iterator[VerifyReport | Exception] = iter(steps)
        self.asked: list[tuple[str, str, int]] = []

    async def verify(self, tier: str, timeout_s: float, *, cursor: str, max_bytes: int) -> VerifyReport:
        self.asked.append((tier, cursor, max_bytes))
        step = next(self._steps)
        if isinstance(step, Exception):
            raise step
        return step


async def run(script: Script, *, seconds: int = 60) -> Tally:
    tally = Tally(node="n", tier="ssd")
    deadline_ns = time.monotonic_ns() + seconds * SECOND
    await scrub(cast(AdminRpc, script), tally, rate=None, deadline_ns=deadline_ns, on_step=lambda tally: None)
    return tally


async def test_scrub_follows_the_cursor_to_the_end_and_adds_up() -> None:
    """Each step goes on where the last one stopped; totals are of all steps."""
    script = Script(
        VerifyReport(checked=2, checked_bytes=200, cursor="two"),
        VerifyReport(checked=1, checked_bytes=50, corrupt=(KEY,), corrupt_count=1, cursor="three"),
        VerifyReport(checked=4, checked_bytes=100),
    )
    tally = await run(script)
    assert script.asked == [("ssd", "", STEP_BYTES), ("ssd", "two", STEP_BYTES), ("ssd", "three", STEP_BYTES)]
    assert (tally.checked, tally.checked_bytes, tally.corrupt, tally.corrupt_count, tally.done) == (7, 350, [KEY], 1, True)


async def test_scrub_whose_cursor_does_not_move_is_an_error() -> None:
    """A node with a defect must not keep a command busy for ever."""
    stuck = VerifyReport(checked=0, checked_bytes=0, cursor="same")
    with pytest.raises(ProtocolError, match="does not get on"):
        await run(Script(stuck, stuck))


async def test_scrub_whose_time_is_over_stops_undone() -> None:
    """Running out of one's own time is no fault of the node; a node that lets a step's limit pass is."""
    assert not (await run(Script(), seconds=0)).done
    with pytest.raises(DeadlineError):
        await run(Script(DeadlineError("slow")))


def test_tally_of_a_tier_full_of_corruption_stays_bounded() -> None:
    """A dead disk must not fill the memory of whoever looks at it; the count is of all."""
    tally = Tally(node="n", tier="ssd")
    step = VerifyReport(checked=3000, checked_bytes=1, corrupt=(KEY,) * 3000, corrupt_count=3000, cursor="c")
    for _ in range(3):
        tally.add(step)
    assert (len(tally.corrupt), tally.corrupt_count, tally.done) == (MAX_CORRUPT_KEYS, 9000, False)


def test_pace_keeps_the_mean_at_the_rate() -> None:
    """Ahead of the rate waits, behind it doesn't; steps shrink with the rate so that there are no bursts."""
    assert pause_s(10 * MIB, 10 * MIB, 0.25) == 0.75
    assert pause_s(10 * MIB, 10 * MIB, 2.0) == 0.0
    assert pause_s(10 * GIB, None, 0.0) == 0.0
    assert (step_bytes(None), step_bytes(4 * GIB), step_bytes(4 * MIB), step_bytes(1)) == (STEP_BYTES, STEP_BYTES, MIB, 1)
