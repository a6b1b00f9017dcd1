"""One decode node: every request under way gets a token at each step, and a step is the longer the more KV is in use.

Since all get their tokens together, one count of steps tells who is through: a request that came at step s and wants n tokens is through
at step s + n. KV is reserved for prompt and answer; a request that finds no room waits, first come, first served.

A node may prefill prompts as guests, a chunk at a time in the order of its engine: beside each step as much as keeps the time between
tokens at four fifths of the SLO; without answers under way, at full speed.
"""

from collections import deque
from heapq import heappop, heappush

from kvpool.policy.routing import WorkerOrder
from kvpool.replay.sim.prefill import Job, PrefillNode
from kvpool.replay.sim.request import Fate
from kvpool.replay.sim.world import World

_ROUND = 0.8
"""So much of the SLO for the time between tokens a step and a guest's part of it take together."""


class DecodeNode:
    """The requests under way and in line on one node."""

    def __init__(self, world: World, order: WorkerOrder = WorkerOrder.ARRIVAL) -> None:
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
        self.guests = PrefillNode(world, order)
        """What is prefilled here; its `busy_s` count as if nothing else were computed."""
        self._chunk = 0, 0.0
        self._chunk_left = self._chunk_began = 0.0

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

    def invite(self, job: Job, now: float) -> None:
        """Prefill `job`, whose KV has come, here."""
        self._advance(now)
        self.guests.add(job)
        self._next_chunk(now)

    def guest(self, now: float) -> tuple[bool, Job | None]:
        """Whether a guest's chunk is through by now, and whose last it was."""
        self._advance(now)
        job = self.guests.running
        if job is None or self._chunk_left > 1e-6:
            return False, None
        tokens, seconds = self._chunk
        through = self.guests.ran(tokens, seconds)
        job.compute_s += now - self._chunk_began - seconds
        self._next_chunk(now)
        return True, job if through else None

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
        """When the next one is through, answer or guest, if nobody comes; None when none is under way."""
        self._advance(now)
        ends = []
        if self._active:
            ends.append(max(0.0, self._active[0][0] - self._steps) * self._step_s())
        if self.guests.running is not None:
            ends.append(max(0.0, self._chunk_left) / self._share())
        return now + min(ends) if ends else None

    def _advance(self, now: float) -> None:
        if self._active:
            self._steps += (now - self._at) / self._step_s()
        if self.guests.running is not None:
            self._chunk_left -= (now - self._at) * self._share()
        self._at = now

    def _step_s(self) -> float:
        step = self._world.step_s(self._in_use)
        return step / (1.0 - self._share()) if self.guests.running is not None and self._active else step

    def _share(self) -> float:
        """What a guest gets of the time: beside answers what a step leaves of `_ROUND` of the SLO, but never less than a twentieth."""
        return 1.0 if not self._active else max(0.05, 1.0 - self._world.step_s(self._in_use) / (_ROUND * self._world.tbt_slo_s))

    def _next_chunk(self, now: float) -> None:
        job = self.guests.next()
        if job is not None:
            self._chunk = self.guests.chunk(job)
            self._chunk_left, self._chunk_began = self._chunk[1], now

    def _admit(self, now: float) -> None:
        while self._line and (not self._active or self._in_use + _size(self._line[0]) <= self._room):
            fate = self._line.popleft()
            self._in_use += _size(fate)
            self._serial += 1
            heappush(self._active, (self._steps + fate.request.output_tokens, self._serial, now, fate))


def _size(fate: Fate) -> int:
    return fate.request.prompt_tokens + fate.request.output_tokens
