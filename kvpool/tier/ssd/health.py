"""Whether the device takes writes and answers reads, and when to try again.

Theory. A device that fails is a normal event. The first failed write or sync turns the tier read-only: put answers False at once, so
nobody waits for a device that is full or broken. Every few seconds one put is let through as a probe; the first write that succeeds ends
it. Reads are tried always, for a device that takes no writes often still reads; many failures in a row, and the tier says `failed` until
a read succeeds."""

import errno
import logging
import os
from typing import Final

from kvpool.clock import Clock
from kvpool.tier.contract import TierState
from kvpool.tier.ssd.reader import Reader
from kvpool.units import SECOND

log = logging.getLogger(__name__)

PROBE_NS: Final = 2 * SECOND
"""Between two writes that try whether the device has come back."""


class Health:
    """The state of one tier's device; written by the writer only."""

    def __init__(self, clock: Clock, reader: Reader) -> None:
        self._clock, self._reader = clock, reader
        self._reason = ""
        self._probe_ns = 0
        self.write_failures = 0

    @property
    def writable(self) -> bool:
        """Whether to write now: the device is well, or it is time for a probe."""
        return (not self._reason and not self._reader.failed) or self._clock.now_ns() >= self._probe_ns

    @property
    def ailing(self) -> bool:
        """Whether a write now would be a probe."""
        return bool(self._reason) or self._reader.failed

    def probing(self) -> None:
        """A probe begins: the next one is due some time later."""
        self._probe_ns = self._clock.now_ns() + PROBE_NS

    def failed(self, code: int, what: str) -> None:
        """A write did not succeed, with errno `code`; a deadline is no fault of the device."""
        if code == errno.ETIMEDOUT:
            return
        self.write_failures += 1
        self._probe_ns = self._clock.now_ns() + PROBE_NS
        reason = f"{what}: {os.strerror(code)}"
        if reason != self._reason:
            log.error("ssd: read-only from now on, %s", reason)
        self._reason = reason

    def wrote(self) -> None:
        """A write was synced."""
        if self._reason:
            log.warning("ssd: writable again")
        self._reason = ""

    def state(self) -> tuple[TierState, str]:
        """State and reason, as in `TierBooks`."""
        if self._reader.failed:
            return "failed", f"the last {self._reader.failures} reads failed: {os.strerror(self._reader.last_failure)}"
        return ("read-only", self._reason) if self._reason else ("ok", "")
