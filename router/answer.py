"""One choice of an answer: its job, its pieces so far, and how they are told."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from router.api.logprobs import Likely, Spell, chat_logprobs, completion_logprobs
from router.api.shapes import Said
from router.generation import Generation, Piece
from router.job import Job, Trace
from router.text.tool_calls import ToolCall


@dataclass(slots=True, kw_only=True)
class Answer:
    """`leader`: the choice after whose beginning this one begins. `echo`: what of the prompt stands before the answer."""

    chat: bool
    generation: Generation
    leader: int
    spell: Spell
    echo: str = ""
    opened: bool = False
    """Whether its stream has begun."""
    _text: list[str] = field(default_factory=list)
    _likely: list[Likely] = field(default_factory=list)
    _calls: list[tuple[str, ToolCall]] = field(default_factory=list)
    _numbered: int = 0

    @property
    def job(self) -> Job:
        """What was asked of the workers."""
        return self.generation.job

    @property
    def trace(self) -> Trace:
        """What happened so far."""
        return self.generation.trace

    def take(self, piece: Piece) -> None:
        """Keep the next piece of an answer that isn't streamed."""
        self._text.append(piece.text)
        self._likely.extend(piece.likely)
        self._calls.extend((id, call) for _, id, call in self.number(piece.calls))

    def number(self, calls: Sequence[ToolCall]) -> list[tuple[int, str, ToolCall]]:
        """The next calls with their numbers in the answer and fresh ids."""
        numbered = [(self._numbered + at, f"call_{uuid.uuid4().hex[:24]}", call) for at, call in enumerate(calls)]
        self._numbered += len(numbered)
        return numbered

    def logprobs(self, likely: Sequence[Likely]) -> dict[str, Any] | None:
        """The log-probabilities of some tokens, spelled; None when they weren't asked for."""
        if self.job.sampling.logprobs is None:
            return None
        return chat_logprobs(likely, self.spell) if self.chat else completion_logprobs(likely, self.spell, len(self.echo))

    def said(self) -> Said:
        """All that was taken, once it is complete."""
        return Said(
            text=self.echo + "".join(self._text),
            finish_reason=self.generation.finish_reason,
            logprobs=self.logprobs(self._likely),
            calls=self._calls,
        )
