"""One rank's side: carries out a step's plan between the engine's KV and the pool, and reports what became of it.

Loads. `within_step` ones are over before the forward reads their blocks; the others go on beside the engine's steps and are reported when
they are over, as they are even when nothing came. Saves are begun when a step is over and go on beside the next ones; the scheduler keeps
their blocks from being used again until they are reported. Only those of a hand-off are waited for, in the step that ends its prompt.

A load within a step that fails is known too late for the step: it computes on blocks that hold nothing, and so may the steps that are
scheduled already. What those compute must not reach the pool under a pure key. So from a failure on nothing is saved until a plan comes
whose scheduler knows of it (`StepPlan.failures_seen`).
"""

import logging
import threading
import time
from collections.abc import Callable

from kvpool.block import BlockKey
from kvpool.connectors.vllm.calls import Call
from kvpool.connectors.vllm.chains import keys_of
from kvpool.connectors.vllm.layers import LayerGate, Link
from kvpool.connectors.vllm.messages import LoadJob, SaveJob, StepPlan, StepReport
from kvpool.connectors.vllm.pages import Pages
from kvpool.connectors.vllm.settings import Settings
from kvpool.connectors.vllm.stats import Tally
from kvpool.transport.reach import Bytes
from kvpool.units import SECOND

log = logging.getLogger(__name__)

_IDLE_S = 0.002
"""A step without a forward waits so long for something to end, instead of letting the engine ask again at once."""


class Worker:
    """The rank whose namespace has `root`, over its `pages`. `saves`: whether this rank is the one of those with equal bytes that saves."""

    def __init__(self, root: bytes, pages: Pages, link: Link, settings: Settings, *, saves: bool = True) -> None:
        self._root, self._pages, self._link, self._settings, self._saves = root, pages, link, settings, saves
        self._block_bytes = sum(pages.layers.layer_bytes)
        self._chains: dict[str, list[BlockKey]] = {}
        self._plan = StepPlan()
        self._gate: LayerGate | None = None
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._report = StepReport()
        self._received: set[str] = set()
        self._invalid: set[int] = set()
        self._calls: dict[Call, str] = {}
        self._failed_within = 0
        self._forward = True
        self.tally = Tally()

    def bind(self, plan: StepPlan) -> None:
        """The plan of the step that begins."""
        self._plan = plan
        for request_id, names in plan.names.items():
            self._chains.setdefault(request_id, []).extend(keys_of(self._root, names))

    def start_loads(self, *, forward: bool) -> None:
        """Begin the step's loads; return when those that it needs are there, or on their way layer by layer. `forward`: one follows."""
        self._forward = forward
        loads, self._plan.loads = self._plan.loads, []
        calls = [self._load(job, alone=len(loads) == 1) for job in loads]
        for job, call in zip(loads, calls, strict=True):
            if job.within_step and self._gate is None:
                call.wait()

    def wait_layer(self, name: str) -> None:
        """Return when a layer may be read."""
        if self._gate is not None:
            self._gate.wait(name)

    def finish_step(self) -> None:
        """The forward is over: begin the step's saves, and wait for hand-offs."""
        if self._gate is not None:
            self._gate.finish()
            self._gate = None
        saves, self._plan.saves = self._plan.saves, []
        for job in saves:
            self._save(job)
        for request_id in self._plan.hand_offs:
            with self._lock:
                calls = [call for call, name in self._calls.items() if name == request_id]
            for call in calls:
                call.wait()
        self._plan.hand_offs = []
        for request_id in self._plan.ended:
            self._chains.pop(request_id, None)
        self._plan.ended = []

    def received(self) -> set[str]:
        """Requests whose loads beside the steps have ended since the last call."""
        now_ns = time.monotonic_ns()
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.give_up(now_ns)
        with self._lock:
            if not self._forward and self._calls and not self._received and self._report.empty:
                self._ended.wait(_IDLE_S)
            received, self._received = self._received, set()
        return received

    def invalid_blocks(self) -> set[int]:
        """The engine's blocks whose load failed since the last call."""
        with self._lock:
            invalid, self._invalid = self._invalid, set()
        return invalid

    def report(self) -> StepReport | None:
        """What got done since the last call."""
        with self._lock:
            report, self._report = self._report, StepReport()
        report.failed_within = self._failed_within
        report.computed, self._plan.timed = self._plan.timed, 0
        return None if report.empty else report

    def counts(self) -> dict[str, float]:
        """What was counted since the last call."""
        with self._lock:
            return self.tally.take()

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing runs any more."""
        with self._lock:
            return self._ended.wait_for(lambda: not self._calls, timeout_s)

    def _load(self, job: LoadJob, *, alone: bool) -> Call:
        """Start a load, layer by layer where that is asked for and it is `alone`."""
        started = time.monotonic_ns()
        deadline_ns = started + job.limit_ns
        chain = self._chains[job.request_id][: job.first + len(job.block_ids)]
        target = self._pages.into(job.block_ids)
        call = self._call(job.request_id, deadline_ns, lambda came: self._loaded(job, came, started), target.settle)
        if job.within_step and alone and self._settings.load == "layers":
            self._gate = LayerGate(self._pages.layers.names, call, target, deadline_ns)
            self._gate.start(self._link, chain, job.first)
            return call

        def sink(index: int, payload: Bytes) -> None:
            call.check()
            target.write(index - job.first, payload)

        call.follow(self._link.load(chain, job.first, sink, deadline_ns))
        return call

    def _loaded(self, job: LoadJob, came: int, started_ns: int) -> None:
        """Note how a load ended."""
        wanted = len(job.block_ids)
        if came < wanted:
            self._invalid.update(job.block_ids[came:])
            self._report.short[job.request_id] = came
            self._failed_within += job.within_step
            log.warning("request %s: %d of %d blocks came from the pool, the rest is computed", job.request_id, came, wanted)
        if job.within_step:
            self.tally.add("loads_within_step")
        else:
            self._received.add(job.request_id)
        self._count("load", came, wanted, started_ns, came)

    def _save(self, job: SaveJob) -> None:
        """Begin a save, unless nothing is to be saved."""
        if not self._saves or self._plan.failures_seen < self._failed_within:
            with self._lock:
                if self._saves:
                    self.tally.add("dropped_blocks", len(job.block_ids))
                self._report.saved[job.number] = [0 if self._saves else len(job.block_ids)]
            return
        started = time.monotonic_ns()
        deadline_ns = started + int(self._settings.save_s * SECOND)
        chain = self._chains[job.request_id][: job.first + len(job.block_ids)]
        source, written = self._pages.out(job.block_ids), list[int]()

        def fill(index: int, payload: Bytes) -> None:
            call.check()
            source.read(index - job.first, payload)
            call.check()
            written.append(index)

        def saved(held: int) -> None:
            self._report.saved[job.number] = [held]
            self._count("save", held, len(job.block_ids), started, len(written))

        call = self._call(job.request_id, deadline_ns, saved)
        call.follow(self._link.store(chain, job.first, fill, deadline_ns))

    def _call(self, request_id: str, deadline_ns: int, note: Callable[[int], None], settle: Callable[[], None] | None = None) -> Call:
        """A call that is noted, under the lock, when it ends."""

        def ended(count: int) -> None:
            with self._lock:
                self._calls.pop(call, None)
                note(count)
                self._ended.notify_all()

        call = Call(deadline_ns, ended, settle)
        with self._lock:
            self._calls[call] = request_id
        return call

    def _count(self, kind: str, done: int, wanted: int, started_ns: int, copied: int) -> None:
        self.tally.add(f"{kind}s")
        self.tally.add(f"{kind}_seconds", (time.monotonic_ns() - started_ns) / SECOND)
        self.tally.add(f"{kind}_blocks", done)
        self.tally.add(f"{kind}_bytes", copied * self._block_bytes)
        if done < wanted:
            self.tally.add(f"{kind}_failed_blocks", wanted - done)
