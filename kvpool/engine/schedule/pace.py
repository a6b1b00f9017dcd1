"""How much of prompts the next pass may take so that answers keep their target: `kvpool.policy.pace` with what this worker measures.

A pass is taken to last a + b x rows, a row being a token of an answer or of a prompt; both are learnt from the passes there were, of which
50 count half. Before the first one a chunk is thought to take one target.
"""

from collections.abc import Sequence

from kvpool.engine.schedule.work import Work
from kvpool.policy.pace import longest, part, riding
from kvpool.policy.routing.fit import Fit
from kvpool.units import SECOND

_HALF_LIFE = 50.0


class Pace:
    """`target_ns` between the tokens of an answer, in the mean since it began to be decoded here."""

    def __init__(self, target_ns: int, chunk_tokens: int) -> None:
        self._target_s = target_ns / SECOND
        self._chunk_tokens = chunk_tokens
        self._began: dict[Work, tuple[int, int]] = {}  # when, and how many tokens it had then
        self._pass_s = Fit((0.0, self._target_s / chunk_tokens), half_life=_HALF_LIFE)
        self.part = part(chunk_tokens)
        """Prompts are cut at multiples of it where a chunk is too much."""

    def ran(self, rows: int, took_ns: int) -> None:
        """A pass of so many rows took so long. 0 ns: that isn't known."""
        self._pass_s.add((1.0, rows), took_ns / SECOND)

    def budget(self, decoding: Sequence[Work], now_ns: int) -> int:
        """Prompt tokens of the next pass, if `decoding` are all that want a token now. Who is missing begins anew when it comes again."""
        self._began = {work: self._began.get(work, (now_ns, work.known)) for work in decoding}
        if not decoding:
            return self._chunk_tokens
        ahead_s = min(self._ahead_s(work, now_ns) for work in decoding)
        limit_s = longest(self._target_s, ahead_s)
        return riding(limit_s, self._chunk_tokens, lambda tokens: self._pass_s.seconds((1.0, len(decoding) + tokens)))

    def _ahead_s(self, work: Work, now_ns: int) -> float:
        began_ns, known = self._began[work]
        return (work.known - known) * self._target_s - (now_ns - began_ns) / SECOND
