"""One answer as text: the dispatcher's tokens, detokenised and cut at stop strings."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from kvpool.clock import Clock
from kvpool.request import FinishReason
from router.dispatch import Dispatcher
from router.job import Job, Trace
from router.text.detokenizer import Detokenizer
from router.text.stops import StopScanner


class Generation:
    """The pieces of one answer; afterwards, why it ended."""

    def __init__(
        self,
        *,
        job: Job,
        trace: Trace,
        detokenizer: Detokenizer,
        stops: StopScanner,
        clock: Clock,
        on_gap: Callable[[int], None],
    ) -> None:
        """`on_gap` is told the nanoseconds between consecutive tokens."""
        self._job = job
        self._trace = trace
        self._detokenizer = detokenizer
        self._stops = stops
        self._clock = clock
        self._on_gap = on_gap

    @property
    def finish_reason(self) -> str:
        """`stop` or `length`, once the pieces are through."""
        if self._stops.stopped or self._trace.reason is FinishReason.STOP:
            return "stop"
        return "length"

    async def pieces(self, dispatcher: Dispatcher) -> AsyncGenerator[str, None]:
        """Non-empty pieces of text in order. A stop string ends it and cancels the worker's call at once, and so does closing it."""
        last_ns = 0
        async with aclosing(dispatcher.generate(self._job, self._trace)) as tokens:
            async for token in tokens:
                now_ns = self._clock.now_ns()
                if last_ns:
                    self._on_gap(now_ns - last_ns)
                last_ns = now_ns
                text = self._stops.push(self._detokenizer.push(token))
                if self._stops.stopped:
                    break
                if text:
                    yield text
        if not self._stops.stopped:
            text = self._stops.push(self._detokenizer.finish())
            if not self._stops.stopped:
                text += self._stops.finish()
        if text:
            yield text
