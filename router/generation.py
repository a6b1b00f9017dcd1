"""One answer as text: the dispatcher's tokens, detokenised, cut at stop strings, tool calls taken out, log-probabilities beside it."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import NamedTuple

from kvpool.clock import Clock
from kvpool.request import FinishReason
from router.api.logprobs import Likely
from router.dispatch import Dispatcher
from router.job import Job, Trace
from router.text.detokenizer import Detokenizer
from router.text.stops import StopScanner
from router.text.tool_calls import ToolCall, ToolCallScanner


class Piece(NamedTuple):
    """What came next: text, the tokens whose text begins in it or before (if log-probabilities were asked for), tool calls."""

    text: str
    likely: tuple[Likely, ...] = ()
    calls: tuple[ToolCall, ...] = ()


class Generation:
    """The pieces of one answer; afterwards, why it ended."""

    def __init__(
        self,
        *,
        job: Job,
        trace: Trace,
        detokenizer: Detokenizer,
        stops: StopScanner,
        tools: ToolCallScanner | None = None,
        clock: Clock,
        on_gap: Callable[[int], None],
    ) -> None:
        """`tools` None: the answer has no tool calls. `on_gap` is told the nanoseconds between consecutive tokens."""
        self.job = job
        self.trace = trace
        self._detokenizer = detokenizer
        self._stops = stops
        self._tools = tools
        self._clock = clock
        self._on_gap = on_gap
        self._wants_logprobs = job.sampling.logprobs is not None
        self._likely: list[Likely] = []
        self._settled = self._passed = 0
        """Characters that the detokenizer has given, and those that can't be part of a stop string."""

    @property
    def finish_reason(self) -> str:
        """`stop`, `tool_calls` or `length`, once the pieces are through."""
        if self._tools is not None and self._tools.calls:
            return "tool_calls"
        if self._stops.stopped or self.trace.reason is FinishReason.STOP:
            return "stop"
        return "length"

    async def pieces(self, dispatcher: Dispatcher) -> AsyncGenerator[Piece, None]:
        """Pieces in order, none empty. A stop string ends it and cancels the worker's call at once, and so does closing it."""
        last_ns = 0
        push, stops = self._detokenizer.push, self._stops
        async with aclosing(dispatcher.generate(self.job, self.trace)) as tokens:
            async for token in tokens:
                now_ns = self._clock.now_ns()
                if last_ns:
                    self._on_gap(now_ns - last_ns)
                last_ns = now_ns
                fresh = push(token)
                if self._wants_logprobs:
                    self._note(token, fresh)
                text = stops.push(fresh)
                if stops.stopped:
                    break
                if text and (piece := self._piece(text)):
                    yield piece
                    if self._tools is not None and self._tools.full:
                        return
        if not stops.stopped:
            text = stops.push(self._detokenizer.finish())
            if not stops.stopped:
                text += stops.finish()
        if piece := self._last(text):
            yield piece

    def _note(self, token: int, fresh: str) -> None:
        """Keep a token's log-probabilities until its text goes out; a token that ends the answer and has no text has none."""
        if fresh or token not in self.job.stop_tokens:
            self._likely.append(Likely(token, self._settled, self.trace.logprobs[len(self.trace.generated) - 1]))
        self._settled += len(fresh)

    def _piece(self, text: str) -> Piece | None:
        """`text` is certain to be part of the answer."""
        self._passed += len(text)
        calls: list[ToolCall] = []
        if self._tools is not None:
            text, calls = self._tools.push(text)
        if not text and not calls:
            return None
        return Piece(text, self._told(self._passed), tuple(calls))

    def _last(self, text: str) -> Piece | None:
        """The end, with all that was held back; of an answer that a stop string cut only tokens that begin before the cut count."""
        piece = self._piece(text) if text else None
        likely = self._told(self._passed if self._stops.stopped else self._passed + 1)
        held = "" if self._tools is None else self._tools.finish()
        if piece is None:
            return Piece(held, likely) if held or likely else None
        return Piece(piece.text + held, piece.likely + likely, piece.calls)

    def _told(self, before: int) -> tuple[Likely, ...]:
        """Take the tokens whose text begins before character `before`."""
        if not self._likely:
            return ()
        told = tuple(token for token in self._likely if token.offset < before)
        del self._likely[: len(told)]
        return told
