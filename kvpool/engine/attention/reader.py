"""A session as the `Reader` of a segment: it stands between a sequence's keys and its queries in the engine's batched passes.

Passes that begin inside the prompt attend to everything, by the very call the engine makes without a reader, so the prompt's KV
has the same bits; the session watches. The first pass that begins behind the prompt settles the session.
"""

import torch

from kvpool.engine.attention.session import AttentionSession, full_attention
from kvpool.errors import LocalError


class SessionReader:
    """The reader of one sequence, whose first `prompt` tokens are its prompt."""

    def __init__(self, session: AttentionSession, *, prompt: int) -> None:
        self.session = session
        self._prompt = prompt

    def pure(self, tokens: int) -> int:
        """How many of the first `tokens` tokens may be published: KV that follows from the prefix alone."""
        return self.session.taint.publishable(tokens)

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, start: int, scale: float | None
    ) -> torch.Tensor:
        """See `kvpool.engine.paged.attention.Reader`. Raises `LocalError` for a pass that reaches over the prompt's end."""
        queries, scale = query[0], query.shape[3] ** -0.5 if scale is None else scale
        if start >= self._prompt:
            if not self.session.settled:
                self.session.settle(self._prompt)
            return self.session.attend(layer, queries, keys[0], values[0], scale)[None]
        if start + queries.shape[1] > self._prompt:
            raise LocalError(f"a pass from token {start} reaches over the end of a prompt of {self._prompt} tokens")
        self.session.observe(layer, queries, keys[0], values[0], scale)
        return full_attention(queries, keys[0], values[0], scale)[None]
