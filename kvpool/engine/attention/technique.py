"""What an attention-time technique is: asked which earlier tokens to read, told what was computed.

Theory. A *selector* forgets: it keeps a list of tokens per layer and KV head that grows by the newest and shrinks to a budget;
who left never comes back, so its KV may be freed. An *index* keeps everything and answers each query with the tokens that matter
to it; what it saves is reading. Both serve one sequence, layer by layer, hold their state per layer, and are pure tensor code.
While a prompt is computed neither is asked anything: that pass attends to everything, as ever, so the prompt's KV is pure, and
the technique is only told of it. `settle` ends the prompt and fixes the budget.

Token ids count from 0 in the sequence. A list is int64 ``[kv_heads, kept]`` (or ``[1, kept]`` for all heads). Rows of
queries are as in `partial`.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from kvpool.engine.attention.partial import Partial
from kvpool.engine.attention.taint import Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a technique's choice depends on, and what it needs.

    The last `prompt_queries` tokens of the prompt must be computed in this process, not loaded, so that the technique sees their
    queries; None is the whole prompt.
    """

    scope: Scope
    prompt_queries: int | None = 0


class Selection(NamedTuple):
    """Earlier tokens to read: `ids` ``[kv_heads, kept]``, or None for all of them.

    Heads that keep fewer than others are filled up with any ids: `real`, like `ids`, says which count; None: all do.
    The first `moved` of them are read as if they stood `by` positions later. `estimate` stands for tokens that are not read: the
    attention that each row of the queries would pay them.
    """

    ids: Tensor | None
    real: Tensor | None = None
    moved: int = 0
    by: int = 0
    estimate: Partial | None = None


EVERYTHING = Selection(ids=None)


class Seen(NamedTuple):
    """One layer's pass over the newest `new` tokens (n).

    `queries` ``[kv_heads, group * n, dim]`` are theirs. `keys` and `values` ``[kv_heads, read + n, dim]`` are what was read: the tokens
    of the selection (of the prompt's passes: all before), and then the new ones.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    new: int
    scale: float


@runtime_checkable
class TokenSelector(Protocol):
    """Decides which tokens stay."""

    traits: Traits

    def update(self, layer: int, seen: Seen) -> None:
        """A pass was computed: its tokens join and, once settled, who is over the budget leaves."""

    def settle(self, prompt: int) -> None:
        """The prompt of `prompt` tokens is over; keep to the budget from now on."""

    def keep(self, layer: int, past: int) -> Selection:
        """Those that stay of the `past` tokens so far. Raises `LocalError` when it was not shown what it needs to choose."""


@runtime_checkable
class AttentionIndex(Protocol):
    """Finds the tokens that matter to a query."""

    traits: Traits

    def append(self, layer: int, keys: Tensor) -> None:
        """`keys` ``[kv_heads, n, dim]`` are those of the newest tokens."""

    def settle(self, prompt: int) -> None:
        """The prompt of `prompt` tokens is over; this fixes the budget."""

    def query(self, layer: int, queries: Tensor) -> Selection:
        """What `queries` ``[kv_heads, rows, dim]`` should read of all tokens appended so far."""


Technique = TokenSelector | AttentionIndex
