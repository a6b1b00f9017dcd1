"""One decode node: every request under way gets a token at each step, and a step is the longer the more KV is in use.

Since all get their tokens together, one count of steps tells who is through: a request that came at step s and wants n tokens is through
at step s + n. KV is reserved for prompt and answer; a request that finds no room waits, first come, first served.

A node may prefill prompts as guests, a pass at a time in the order of its engine. A pass is a step and a chunk's work at most of guests'
prompts, no more than the engine's scheduler would let ride (`kvpool.policy.pace`). Who comes during a pass gets nothing of it, and the
time until it ends counts as time between its tokens.
"""

from collections import deque
from heapq import heappop, heappush
from typing import NamedTuple

from kvpool.policy.pace import longest, riding
from kvpool.policy.routing import WorkerOrder
from kvpool.replay.sim.prefill import Job, PrefillNode
from kvpool.replay.sim.request import Fate
from kvpool.replay.sim.world import World

_CLOSE = 1e-6
"""Steps by which sums of their parts may miss a whole number."""


class _Answer(NamedTuple):
    """Through after step `ends`; `serial` orders equals. It began after step `joined`, at `began`."""

    ends: float
    serial: int
    joined: float
    began: float
    fate: Fate


class DecodeNode:
    """The requests under way and in line on one node."""

    def __init__(self, world: World, order: WorkerOrder = WorkerOrder.ARRIVAL) -> None:
        self._world = world
        self._room = world.decode_tokens
        self._active: list[_Answer] = []
        self._line: deque[Fate] = deque()
        self._steps = 0.0
        self._serial = 0
        self._at = 0.0
        self.tokens = 0
        """KV in use and promised to those in line."""
        self._in_use = 0
        self.guests = PrefillNode(world, order)
        """What is prefilled here; its `busy_s` count as if nothing else were computed."""
        self._riding: list[tuple[Job, int]] = []
        self._pass_began = self._pass_ends = 0.0
        self._passing = False

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
        """Prefill `job`, whose KV has come, here; `go_on` follows."""
        self._advance(now)
        self.guests.add(job)

    def go_on(self, now: float) -> None:
        """Begin the next pass, if none is under way and there are guests."""
        self._advance(now)
        if self._riding:
            return
        world, took, left = self._world, 0.0, self._world.prefill_s(self._world.chunk_tokens)
        if self._active:
            target, took = world.tbt_slo_s, world.step_s(self._in_use)
            whole = self._steps + _CLOSE  # tokens that answers have; a part of one is none yet
            ahead = min(int(whole - answer.joined) * target - (now - answer.began) for answer in self._active)
            left = min(left, longest(target, ahead) - took)
        while (job := self.guests.take()) is not None:
            tokens = self._rides(job, left)
            seconds = world.prefill_s(tokens, job.done)
            if self._riding and seconds > left:
                self.guests.add(job)
                break
            self._riding.append((job, tokens))
            took, left = took + seconds, left - seconds
        self._passing = bool(self._riding)
        self._pass_began, self._pass_ends = now, now + took

    def guest(self, now: float) -> tuple[bool, list[Job]]:
        """Whether a pass with guests is over by now, and whose last it was. Then `go_on` follows, when the answers of those were added."""
        self._advance(now)
        if not self._riding or self._passing:
            return False, []
        through = []
        for job, tokens in self._riding:
            job.compute_s += now - self._pass_began
            if self.guests.ran(job, tokens, self._world.prefill_s(tokens, job.done)):
                through.append(job)
        self._riding = []
        return True, through

    def through(self, now: float) -> list[Fate]:
        """Those that are through by now; each once."""
        self._advance(now)
        ended: list[Fate] = []
        while self._active and self._active[0].ends <= self._steps + _CLOSE:
            _, _, _, began, fate = heappop(self._active)
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
        if self._passing:
            return self._pass_ends
        if not self._active:
            return None
        return now + max(0.0, self._active[0].ends - self._steps) * self._world.step_s(self._in_use)

    def _rides(self, job: Job, seconds: float) -> int:
        """Tokens of `job` for a pass that has so many seconds left."""
        tokens = riding(seconds, self._world.chunk(job.done), lambda n: self._world.prefill_s(n, job.done))
        return min(tokens, job.prompt - job.done)

    def _advance(self, now: float) -> None:
        if self._passing and now >= self._pass_ends:
            self._passing = False
            self._steps += 1
        elif not self._passing and self._active:
            self._steps += (now - self._at) / self._world.step_s(self._in_use)
        self._at = now

    def _admit(self, now: float) -> None:
        joined = self._steps + self._passing
        while self._line and (not self._active or self._in_use + _size(self._line[0]) <= self._room):
            fate = self._line.popleft()
            self._in_use += _size(fate)
            self._serial += 1
            heappush(self._active, _Answer(joined + fate.request.output_tokens, self._serial, joined, now, fate))


def _size(fate: Fate) -> int:
    return fate.request.prompt_tokens + fate.request.output_tokens
