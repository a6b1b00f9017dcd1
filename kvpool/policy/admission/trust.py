"""How many requests a worker may be given before it has shown that it works. Pure; time is an argument.

Theory. A worker that fails fast is always idle, and whoever looks for an idle worker finds it: one sick worker then eats all requests. So
trust is earned and lost. A new worker may have `START` requests that haven't begun to answer; each that does doubles that, until at `FULL`
it isn't counted any more. A failure takes all trust away: for `REST_NS` the worker gets nothing while there is another, twice as long after
each further failure up to `MAX_REST_NS`, and after its rest one request at a time until one is answered.
"""

from dataclasses import dataclass

from kvpool.units import SECOND

START = 8
FULL = 1024
REST_NS = 5 * SECOND
MAX_REST_NS = 80 * SECOND


@dataclass(slots=True)
class Trust:
    """Of one incarnation of one worker."""

    allowed: int = START
    """Requests that may be unanswered at the same time."""
    failures: int = 0
    """In a row."""
    rests_until_ns: int = 0

    def answered(self) -> None:
        """A request began to be answered."""
        self.failures = 0
        self.rests_until_ns = 0
        self.allowed = min(FULL, max(START, 2 * self.allowed))

    def failed(self, now_ns: int) -> None:
        """A request failed. Those that fail while the worker rests were sent before, and say nothing new."""
        if now_ns < self.rests_until_ns:
            return
        self.rests_until_ns = now_ns + min(MAX_REST_NS, REST_NS << min(self.failures, 10))
        self.failures += 1
        self.allowed = 1

    def rests(self, now_ns: int) -> bool:
        """Whether it should get nothing."""
        return now_ns < self.rests_until_ns

    def left(self, unanswered: int) -> int:
        """Requests that it may be given when it doesn't rest, while `unanswered` of those it has haven't begun to be answered."""
        return FULL if self.allowed >= FULL else max(0, self.allowed - unanswered)
