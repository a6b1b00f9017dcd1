"""One decode node: every request under way gets a token at each step, and a step is the longer the more KV is in use.

Since all get their tokens together, one count of steps tells who is through: a request that came at step s and wants n tokens is through
at step s + n. KV is reserved for prompt and answer; a request that finds no room waits, first come, first served.

A node may prefill short prompts as guests, one after the other: between two steps as much as the SLO for the time between tokens leaves,
so that no answer falls behind it; without answers under way, at full speed.
"""

from collections import deque
from heapq import heappop, heappush

from kvpool.replay.sim.prefill import Job
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
        self._guests: deque[Job] = deque()
        self._guest_left = 0.0
        self.guest_s = 0.0
        """Seconds that guests have computed here."""

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

    @property
    def prefill_share(self) -> float:
        """The part of its time that a guest gets."""
        return self._share() if self._active else 1.0

    def invite(self, job: Job, now: float) -> None:
        """Prefill `job`, whose KV has come, here."""
        self._advance(now)
        self._guests.append(job)
        if len(self._guests) == 1:
            self._guest_left = self._guest_s(job)

    def guest_through(self, now: float) -> Job | None:
        """The guest that is through by now."""
        self._advance(now)
        if not self._guests or self._guest_left > 1e-6:
            return None
        job = self._guests.popleft()
        job.compute_s = self._guest_s(job)
        self.guest_s += job.compute_s
        if self._guests:
            self._guest_left = self._guest_s(self._guests[0])
        return job

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
        if self._guests:
            ends.append(max(0.0, self._guest_left) / self.prefill_share)
        return now + min(ends) if ends else None

    def _advance(self, now: float) -> None:
        if self._active:
            self._steps += (now - self._at) / self._step_s()
        if self._guests:
            self._guest_left -= (now - self._at) * self.prefill_share
        self._at = now

    def _step_s(self) -> float:
        step = self._world.step_s(self._in_use)
        return step / (1.0 - self._share()) if self._guests else step

    def _share(self) -> float:
        """What a guest gets of a round beside answers: the SLO less a step, but never less than a tenth."""
        return max(0.1, 1.0 - self._world.step_s(self._in_use) / self._world.tbt_slo_s)

    def _guest_s(self, job: Job) -> float:
        return self._world.prefill_s(job.prompt - job.context, job.context)

    def _admit(self, now: float) -> None:
        while self._line and (not self._active or self._in_use + _size(self._line[0]) <= self._room):
            fate = self._line.popleft()
            self._in_use += _size(fate)
            self._serial += 1
            heappush(self._active, (self._steps + fate.request.output_tokens, self._serial, now, fate))


def _size(fate: Fate) -> int:
    return fate.request.prompt_tokens + fate.request.output_tokens
