"""What the endpoints share, and what they all do with a prompt."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvpool.clock import Clock
from kvpool.errors import ConfigError
from router.access import Access
from router.api.errors import bad_request, too_many_requests, unsupported
from router.api.messages import talks_of_tools
from router.decisions import Decisions
from router.decisions.recorder import Recorder
from router.dispatch import Dispatcher
from router.metrics import Metrics
from router.settings import Limits
from router.text.model import TextModel

_INLINE_CHARS = 16_384
"""Longer texts are tokenised on a thread; about 5 ms of tokenising."""


@dataclass(slots=True, kw_only=True)
class Services:
    """The parts of one running router."""

    model: TextModel
    dispatcher: Dispatcher
    metrics: Metrics
    limits: Limits
    access: Access
    decisions: Decisions
    clock: Clock
    started_s: int
    """Unix seconds at the start of the router."""
    attention_choices: frozenset[str] = frozenset()
    """Names of the techniques that requests may choose."""
    recorder: Recorder = field(default_factory=Recorder)
    in_flight: int = 0

    @contextmanager
    def slot(self) -> Iterator[None]:
        """One of the places for requests in flight; raises the 429 error when all are taken."""
        if self.in_flight >= self.limits.max_in_flight:
            raise too_many_requests(self.limits.max_in_flight)
        self.in_flight += 1
        self.metrics.in_flight.set(self.in_flight)
        try:
            yield
        finally:
            self.in_flight -= 1
            self.metrics.in_flight.set(self.in_flight)

    def adapters(self) -> dict[str, int]:
        """LoRA adapters, each a model of its own in the API: prompt and answer tokens that all workers with it have room for, by name."""
        rooms: dict[str, int] = {}
        for worker in self.dispatcher.fleet.alive("decode"):
            for name in worker.adapters - {self.model.name}:
                rooms[name] = min(rooms.get(name, self.model.context_tokens), worker.context_tokens)
        return dict(sorted(rooms.items()))

    def context_tokens(self) -> int:
        """Prompt and answer tokens that the model and every live decode worker have room for."""
        workers = self.dispatcher.fleet.alive("decode")
        return min([self.model.context_tokens, *(worker.context_tokens for worker in workers)])

    async def tokens_of(
        self, text: str | None, messages: Sequence[Mapping[str, Any]] = (), tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Token ids of `text`, or (None) of the conversation `messages`; raises the 400 error when the template refuses it or its tools."""
        rendered = text is None
        if text is None:
            refused = self.model.tools_refused
            if refused is not None and (tools or talks_of_tools(messages)):
                raise unsupported("tools" if tools else "messages", refused)
            try:
                text = self.model.render(messages, tools)
            except ConfigError as error:
                raise bad_request(str(error), param="messages") from None
        if len(text) <= _INLINE_CHARS:
            return self.model.encode(text, rendered=rendered)
        return await asyncio.to_thread(self.model.encode, text, rendered=rendered)
