"""Made-up prompts with a trace's lengths and a trace's sharing: equal blocks become equal tokens, all others differ.

Block number b of the trace is the same tokens wherever it stands, since its number says everything before it too. Its first tokens
spell b, so no two blocks begin alike; the rest are drawn from b. Tokens behind the last named block, and all of a trace without blocks,
spell the request.
"""

import random
from collections.abc import Sequence

from kvpool.replay.traces.values import TraceRequest

_REQUEST = 1 << 40
"""Numbers from here on are of requests, not of blocks."""


class Prompts:
    """Makes prompts of the token ids in `alphabet`. A block of the trace, `block_tokens` long, becomes `size` tokens."""

    def __init__(self, alphabet: Sequence[int], *, block_tokens: int, size: int | None = None, seed: int = 0) -> None:
        if len(set(alphabet)) < 2:
            raise ValueError("a prompt needs two different tokens at least")
        self._alphabet, self._seed = sorted(set(alphabet)), seed
        self._block_tokens = block_tokens
        self._size = size or block_tokens
        self._blocks: dict[int, tuple[int, ...]] = {}

    @property
    def scale(self) -> float:
        """Tokens here for each token of the trace."""
        return self._size / self._block_tokens if self._block_tokens else 1.0

    def prompt(self, index: int, request: TraceRequest) -> list[int]:
        """The prompt of request number `index`; at least one token."""
        wanted = max(1, round(request.prompt_tokens * self.scale))
        tokens: list[int] = []
        for block in request.blocks:
            tokens.extend(self._block(block))
        if len(tokens) < wanted:
            tokens.extend(self._drawn(_REQUEST + index, wanted - len(tokens)))
        return tokens[:wanted]

    def output_tokens(self, request: TraceRequest) -> int:
        """The length of its answer, at the same scale; at least one."""
        return max(1, round(request.output_tokens * self.scale))

    def _block(self, number: int) -> Sequence[int]:
        if number not in self._blocks:
            self._blocks[number] = tuple(self._drawn(number, self._size))
        return self._blocks[number]

    def _drawn(self, number: int, length: int) -> list[int]:
        spelled: list[int] = []
        rest = number
        while rest or not spelled:
            rest, digit = divmod(rest, len(self._alphabet))
            spelled.append(self._alphabet[digit])
        draw = random.Random(f"{self._seed}/{number}")
        return (spelled + draw.choices(self._alphabet, k=max(0, length - len(spelled))))[:length]
