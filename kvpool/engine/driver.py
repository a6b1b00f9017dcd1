"""What moves sequences on: asks the scheduler before each pass, runs the pass, hands out what came of it.

All that is decided is decided on the event loop, between passes; a pass runs on the compute thread meanwhile loads and pushes go on.
Whoever comes or goes during a pass is seen by the next plan, so a cancelled request computes for at most one pass more.
"""

import asyncio
import logging
import time
from collections.abc import Sequence as List
from dataclasses import dataclass

from kvpool.engine.compute import ComputeThread
from kvpool.engine.model import Model
from kvpool.engine.paged.attention import Segment
from kvpool.engine.paged.store import KvStore
from kvpool.engine.prefill import Rate
from kvpool.engine.sampling import Sampled
from kvpool.engine.schedule.scheduler import Plan, Scheduler
from kvpool.engine.schedule.work import State, Turn, Work
from kvpool.engine.sequence import Sequence
from kvpool.engine.streaming import LayersMissingError
from kvpool.errors import ClosedError, DeadlineError, KvpoolError, LocalError

log = logging.getLogger(__name__)

_LOOK_S = 0.05
"""While nothing can be computed but something waits, how often it is looked at again."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What passes are run with. `steady`: see `Model`."""

    model: Model
    kv: KvStore
    compute: ComputeThread
    rate: Rate
    steady: bool


class Driver:
    """Serves sequences, as `scheduler` decides. Lives on one event loop; close it."""

    def __init__(self, machine: Machine, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._machine = machine
        self._sequences: dict[Work, Sequence] = {}
        self._gathers: dict[Work, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._main: asyncio.Task[None] | None = None
        self._closed = False

    def submit(self, sequence: Sequence) -> None:
        """Serve `sequence`. Raises `OverloadedError`, `ConfigError`, `ClosedError`."""
        if self._closed:
            raise ClosedError("the engine was closed")
        self.scheduler.submit(sequence.work)
        self._sequences[sequence.work] = sequence
        if self._main is None or self._main.done():
            self._main = asyncio.create_task(self._run())
        self.wake()

    def leave(self, sequence: Sequence) -> bool:
        """`sequence` has ended or isn't wanted any more. True when `retired` is to be called at last."""
        work = sequence.work
        if (gather := self._gathers.pop(work, None)) is not None:
            gather.cancel()
        self._sequences.pop(work, None)
        sequence.gone()
        sequence.placed = self.scheduler.leave(work) or sequence.placed
        self.wake()
        return sequence.placed

    def retired(self) -> None:
        """A sequence that had left needs its place no more."""
        self.scheduler.retired()
        self.wake()

    def wake(self) -> None:
        """Something has changed: who waits may be served."""
        self._wake.set()

    def close(self) -> None:
        """Fail all there are, refuse the next ones. The pass that runs isn't waited for."""
        self._closed = True
        for sequence in list(self._sequences.values()):
            sequence.fail(ClosedError("the engine was closed"))
        for task in (*self._gathers.values(), *((self._main,) if self._main else ())):
            task.cancel()
        self._gathers.clear()

    async def _run(self) -> None:
        """Until nobody is left."""
        while self._sequences and not self._closed:
            self._wake.clear()
            for work, sequence in self._sequences.items():
                work.paused = not sequence.slack
            plan = self.scheduler.plan(time.monotonic_ns())
            self._machine.kv.copy(plan.copies)
            self._tell(plan)
            if plan.turns:
                await self._pass(plan.turns)
            else:
                try:
                    async with asyncio.timeout(_LOOK_S):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    def _tell(self, plan: Plan) -> None:
        for work in plan.expired:
            self._sequences.pop(work).fail(DeadlineError("the deadline passed while the request waited for its turn"))
        for work in plan.preempted:
            self._sequences[work].preempted()
        for work in plan.admitted:
            task = asyncio.create_task(self._gather(work, self._sequences[work]))
            self._gathers[work] = task

    async def _gather(self, work: Work, sequence: Sequence) -> None:
        try:
            have = await sequence.gather()
        except KvpoolError as error:
            sequence.fail(error)
            self.leave(sequence)
            return
        finally:
            self._gathers.pop(work, None)
        if work.state is State.LOADING:
            self.scheduler.loaded(work, have)
            sequence.ready()
            self.wake()

    async def _pass(self, turns: List[Turn]) -> None:
        sequences = [self._sequences[turn.work] for turn in turns]
        segments = [sequence.segment(turn) for sequence, turn in zip(sequences, turns, strict=True)]
        began_ns = time.monotonic_ns()
        try:
            ran = await self._machine.compute.run(lambda: self._compute(sequences, segments))
        except LayersMissingError:
            for turn in self.scheduler.dropped():
                self._sequences[turn.work].lost()
            return
        except KvpoolError as error:
            for sequence in sequences:
                sequence.fail(error)
                self.leave(sequence)
            self.scheduler.dropped()
            return
        waited_ns = sum(segment.gate.waited_ns for segment in segments if segment.gate is not None)
        took_ns = ran.took_ns - waited_ns
        self._machine.rate.add(sum(len(segment.tokens) for segment in segments), took_ns)
        chosen = dict(zip((turn.work for turn in turns), ran.value, strict=True))
        for turn in self.scheduler.done(took_ns):
            sampled, sequence = chosen[turn.work], self._sequences[turn.work]
            if isinstance(sampled, KvpoolError):
                sequence.fail(sampled)
                self.leave(sequence)
            elif sequence.computed(sampled, began_ns, ran.took_ns):
                self.leave(sequence)

    def _compute(self, sequences: List[Sequence], segments: List[Segment]) -> list[Sampled | KvpoolError | None]:
        """On the compute thread: the pass, and the token that each sequence goes on with, or why there is none."""
        machine = self._machine
        scores = iter(machine.model.run(machine.kv, segments, steady=machine.steady).numpy())
        chosen: list[Sampled | KvpoolError | None] = []
        for sequence, segment in zip(sequences, segments, strict=True):
            try:
                chosen.append(sequence.sample(next(scores)) if segment.scores else None)
            except LocalError as error:
                chosen.append(error)
        return chosen
