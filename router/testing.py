"""Twins for tests: workers that follow a script, a cluster changed by hand, and an event loop whose time jumps instead of passing.

A scripted worker answers as a real one does: the token at a position depends on the prompt and the position only, whoever computes it.
"""

import asyncio
import selectors
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvpool.cluster import Member
from kvpool.errors import ConfigError, UnavailableError
from kvpool.request import (
    DecodeEvent,
    DecodeRequest,
    Finished,
    FinishReason,
    FirstToken,
    PrefillEvent,
    PrefillRequest,
    Published,
    StageTimes,
    Started,
    TokenOut,
    TokenSources,
    WorkerStatus,
)

T = TypeVar("T")

Answer = Callable[[tuple[int, ...], int], int]
"""(prompt, position in the answer) -> token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong in one call, before event number `after` (from 0): `die`, `hang`, `end` (no error) or `refuse`."""

    kind: str
    after: int = 0


class ScriptedWorker:
    """A `WorkerPort` that needs no worker."""

    def __init__(self, answer: Answer, *, cached: int = 0, delay_s: float = 0.0) -> None:
        """`cached` prompt tokens are said to come from the pool; every event takes `delay_s`."""
        self.answer = answer
        self.cached = cached
        self.delay_s = delay_s
        self.faults: deque[Fault] = deque()
        """One for each coming call, in order; calls beyond them go well."""
        self.answers_status = True
        self.calls: list[PrefillRequest | DecodeRequest] = []
        self.running = 0
        self.cancelled = 0
        """Calls the caller gave up."""
        self.closed = False

    async def prefill(self, request: PrefillRequest, timeout_s: float) -> AsyncGenerator[PrefillEvent, None]:
        """See `WorkerPort`."""
        sources = self._sources(len(request.prompt))
        first = FirstToken(token=self.answer(request.prompt, 0), sources=sources, times=StageTimes(compute_ns=1_000_000))
        async for event in self._run(request, [first, Published(tokens=len(request.prompt), blocks_written=1)]):
            yield event

    async def decode(self, request: DecodeRequest, timeout_s: float) -> AsyncGenerator[DecodeEvent, None]:
        """See `WorkerPort`."""
        events: list[DecodeEvent] = [Started(sources=self._sources(len(request.prompt)), times=StageTimes(load_ns=1_000_000))]
        reason = FinishReason.LENGTH
        for position in range(len(request.generated), request.max_tokens):
            token = self.answer(request.prompt, position)
            events.append(TokenOut(token=token))
            if token in request.stop_tokens:
                reason = FinishReason.STOP
                break
        async for event in self._run(request, [*events, Finished(reason=reason)]):
            yield event

    async def status(self, timeout_s: float) -> WorkerStatus:
        """See `WorkerPort`; never answers while `answers_status` is false."""
        if not self.answers_status:
            await asyncio.Event().wait()
        return WorkerStatus(
            role="decode",
            model="m",
            active_requests=self.running,
            queued_requests=0,
            finished_requests=0,
            failed_requests=0,
            prefill_tokens_per_s=0.0,
            resident_tokens=0,
            reaches={},
        )

    async def close(self) -> None:
        """See `WorkerPort`."""
        self.closed = True

    def _sources(self, prompt: int) -> TokenSources:
        cached = min(self.cached, prompt)
        return TokenSources(pool=cached, computed=prompt - cached)

    async def _run(self, request: PrefillRequest | DecodeRequest, events: Sequence[Any]) -> AsyncGenerator[Any, None]:
        self.calls.append(request)
        fault = self.faults.popleft() if self.faults else None
        self.running += 1
        try:
            for number, event in enumerate(events):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if fault is not None and number == fault.after:
                    if fault.kind == "end":
                        return
                    await _fail(fault)
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


async def _fail(fault: Fault) -> None:
    if fault.kind == "hang":
        await asyncio.Event().wait()
    if fault.kind == "refuse":
        raise ConfigError("the worker does not like this request")
    raise UnavailableError("the worker died")


class ScriptedCluster:
    """A `ClusterView` changed by hand, and the connections to what is in it."""

    def __init__(self, model: str, block_tokens: int = 4, max_tokens: int = 4096) -> None:
        self._info = {"model": model, "namespace": "ab" * 32, "block_tokens": str(block_tokens), "max_tokens": str(max_tokens)}
        self._members: tuple[Member, ...] = ()
        self._ports: dict[str, Any] = {}
        self._callbacks: list[Callable[[tuple[Member, ...]], None]] = []

    def add(self, role: str, port: Any, *, id: str | None = None, incarnation: int = 1, **info: str) -> Member:
        """A process joins; `connect` gives `port` for its address."""
        address = f"worker:{len(self._ports) + 1}"
        self._ports[address] = port
        known = {**self._info, **info}
        member = Member(role=role, id=id or uuid.uuid4().hex, incarnation=incarnation, address=address, info=known)
        self._show((*(m for m in self._members if (m.role, m.id) != (member.role, member.id)), member))
        return member

    def remove(self, member: Member) -> None:
        """It leaves."""
        self._show(tuple(m for m in self._members if m != member))

    def connect(self, address: str) -> Any:
        """The port at `address`."""
        return self._ports[address]

    def members(self, role: str | None = None) -> tuple[Member, ...]:
        """See `ClusterView`."""
        return tuple(m for m in self._members if role is None or m.role == role)

    def subscribe(self, callback: Callable[[tuple[Member, ...]], None]) -> Callable[[], None]:
        """See `ClusterView`."""
        self._callbacks.append(callback)
        callback(self._members)
        return lambda: self._callbacks.remove(callback)

    def _show(self, members: tuple[Member, ...]) -> None:
        self._members = members
        for callback in self._callbacks:
            callback(members)


class _Jump(selectors.DefaultSelector):
    """A selector that, with nothing to do until some time, makes it that time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Never waits."""
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("everything waits for something that nothing will bring about")
            self.now_s += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time: what waits longest costs nothing. It is a `Clock` too. No threads, no sockets."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jump.now_s

    def now_ns(self) -> int:
        """Virtual nanoseconds."""
        return round(self._jump.now_s * 1e9)


def run_virtual(work: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Run `work(loop)` to its end on a fresh virtual loop."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work(loop))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
