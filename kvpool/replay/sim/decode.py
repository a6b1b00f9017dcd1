"""One decode node: every request under way gets a token at each step, and a step is the longer the more KV is in use.

Since all get their tokens together, one count of steps tells who is through: a request that came at step s and wants n tokens is through
at step s + n. KV is reserved for prompt and answer; a request that finds no room waits, first come, first served.
"""

from collections import deque
from heapq import heappop, heappush

from kvpool.replay.sim.request import Fate
from kvpool.replay.sim.world import World


class DecodeNode:
    """The requests under way and in line on one node."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._room = world.decode_tokens
        self._active: list[tuple[float, int, float, Fate]] = []  # (step at which it is through, serial, began, whose)
        self._line: deque[Fate] = deque()
        self._steps = 0.0
        self._serial = 0
        self._at = 0.0
        self.tokens = 0
        """KV in use and promised to those in line."""
        self._in_use = 0

    @property
    def active(self) -> int:
        """Requests here."""
        return len(self._active) + len(self._line)

    @property
    def waiting(self) -> int:
        """Those of them that found no room."""
        return len(self._line)

    def add(self, fate: Fate, now: float) -> None:
        """A request has its KV here."""
        self._advance(now)
        self.tokens += _size(fate)
        self._line.append(fate)
        self._admit(now)

    def through(self, now: float) -> list[Fate]:
        """Those that are through by now; each once."""
        self._advance(now)
        ended: list[Fate] = []
        while self._active and self._active[0][0] <= self._steps + 1e-6:
            _, _, began, fate = heappop(self._active)
            fate.finished_s = now
            fate.step_s = (now - began) / max(1, fate.request.output_tokens)
            self._in_use -= _size(fate)
            self.tokens -= _size(fate)
            ended.append(fate)
        self._admit(now)
        return ended

    def next_s(self, now: float) -> float | None:
        """When the next one is through if nobody comes; None when none is under way."""
        self._advance(now)
        if not self._active:
            return None
        return now + max(0.0, self._active[0][0] - self._steps) * self._world.step_s(self._in_use)

    def _advance(self, now: float) -> None:
        if self._active:
            self._steps += (now - self._at) / self._world.step_s(self._in_use)
        self._at = now

    def _admit(self, now: float) -> None:
        while self._line and (not self._active or self._in_use + _size(self._line[0]) <= self._room):
            fate = self._line.popleft()
            self._in_use += _size(fate)
            self._serial += 1
            heappush(self._active, (self._steps + fate.request.output_tokens, self._serial, now, fate))


def _size(fate: Fate) -> int:
    return fate.request.prompt_tokens + fate.request.output_tokens
