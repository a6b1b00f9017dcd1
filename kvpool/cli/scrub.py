"""Reading a tier of a node from end to end in bounded steps, no faster than asked, and counting what was found.

A scrub is a loop over the node's cursor: each step reads some megabytes and answers where to go on. It ends when the cursor is
empty, when its time is over, or when a node stops getting on, which would be a defect of the node and must not loop for ever.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpool.clock import seconds_left
from kvpool.errors import DeadlineError, ProtocolError
from kvpool.request.admin import MAX_CORRUPT_KEYS, VerifyReport
from kvpool.units import MIB
from kvpool.wire.admin_client import AdminRpc

STEP_BYTES = 64 * MIB
STEP_TIMEOUT_S = 60.0
_STEPS_PER_SECOND = 4


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a scrub of one tier has found so far. `corrupt` lists at most `MAX_CORRUPT_KEYS`; `done`: it came to the end."""

    node: str
    tier: str
    checked: int = 0
    checked_bytes: int = 0
    corrupt: list[bytes] = field(default_factory=list)
    corrupt_count: int = 0
    done: bool = False

    def add(self, step: VerifyReport) -> None:
        """Count a step."""
        self.checked += step.checked
        self.checked_bytes += step.checked_bytes
        self.corrupt_count += step.corrupt_count
        self.corrupt.extend(step.corrupt[: MAX_CORRUPT_KEYS - len(self.corrupt)])
        self.done = not step.cursor


def step_bytes(rate: int | None) -> int:
    """Bytes of one step at `rate` bytes/s (None: no limit): small enough that a low rate is kept without bursts."""
    return STEP_BYTES if rate is None else min(STEP_BYTES, max(1, rate // _STEPS_PER_SECOND))


def pause_s(checked_bytes: int, rate: int | None, elapsed_s: float) -> float:
    """Seconds to wait after `checked_bytes` in `elapsed_s` seconds, so as not to be ahead of `rate`."""
    return 0.0 if rate is None else max(0.0, checked_bytes / rate - elapsed_s)


async def scrub(rpc: AdminRpc, tally: Tally, *, rate: int | None, deadline_ns: int, on_step: Callable[[Tally], None]) -> None:
    """Read all of `tally`'s tier at most at `rate` bytes/s, counting into `tally`, which is done unless time ran out first.

    Raises what the call raises, and `ProtocolError` when the cursor comes back unmoved.
    """
    cursor, began = "", time.monotonic()
    while not tally.done:
        left_s = seconds_left(deadline_ns)
        if not left_s:
            return
        try:
            step = await rpc.verify(tally.tier, min(STEP_TIMEOUT_S, left_s), cursor=cursor, max_bytes=step_bytes(rate))
        except DeadlineError:
            if seconds_left(deadline_ns):
                raise
            return  # our time was over in the middle of a step, the node is not to blame
        if step.cursor and step.cursor == cursor:
            raise ProtocolError(f"{rpc.address}: the scrub of {tally.tier} does not get on (cursor {cursor!r})")
        tally.add(step)
        cursor = step.cursor
        on_step(tally)
        wait_s = pause_s(tally.checked_bytes, rate, time.monotonic() - began)
        await asyncio.sleep(0 if tally.done else min(wait_s, seconds_left(deadline_ns)))
