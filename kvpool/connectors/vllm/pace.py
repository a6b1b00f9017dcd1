"""How fast the engine computes prompts, as far as its steps tell: what a load must not take longer than.

A step is timed from its plan, or the end of the timed step before it if that came later (steps may be planned ahead), to the report that
it is computed. Steps of few tokens say little and are not timed. The fastest step of late counts: an estimate is the last one, a tenth
forgotten, or the new one if that is faster.
"""

from kvpool.units import MS, SECOND

FEW_TOKENS = 64
LEAST_NS = 100 * MS
"""A load may take so long whatever it saves: less is within what a busy machine adds."""
_AHEAD = 16


class Pace:
    """Of one engine; `rate` is in tokens a second, 0 while nothing is known."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._number = 0
        self._begun: dict[int, tuple[int, int]] = {}
        self._ended_ns = 0

    def begin(self, tokens: int, now_ns: int) -> int:
        """A step of so many tokens is planned; its number if it is timed, else 0."""
        if tokens < FEW_TOKENS:
            return 0
        self._number += 1
        self._begun[self._number] = tokens, now_ns
        self._begun.pop(self._number - _AHEAD, None)
        return self._number

    def end(self, number: int, now_ns: int) -> None:
        """A timed step is computed."""
        begun = self._begun.pop(number, None)
        if begun is not None:
            tokens, planned_ns = begun
            took_ns = max(1, now_ns - max(planned_ns, self._ended_ns))
            self.rate = max(0.9 * self.rate, tokens * SECOND / took_ns)
            self._ended_ns = now_ns

    def limit_ns(self, tokens: int, most_ns: int) -> int:
        """How long a load of so many tokens may take: as long as computing them would, at most `most_ns`."""
        if not self.rate:
            return most_ns
        return min(most_ns, max(LEAST_NS, int(tokens * SECOND / self.rate)))
