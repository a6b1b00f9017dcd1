"""One request as the scheduler sees it: how many tokens want KV, which blocks it has, what state it is in."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpool.block import BlockKey
from kvpool.engine.paged.blocks import Table

NEVER_NS = 2**63 - 1


class State(enum.Enum):
    """Where a request is. Waiting -> loading -> ready, and back to waiting when it is preempted; gone from anywhere."""

    WAITING = "waiting"
    """Has no blocks."""
    LOADING = "loading"
    """Has blocks for all its tokens; what is known of their KV is being fetched."""
    READY = "ready"
    """The rest is to be computed."""
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Work:
    """`known` tokens so far (prompt and generated), of which all want KV; it may come to `limit` tokens.

    `keys`: of the blocks that somebody may have, the last possibly partial. At most `usable` tokens are taken from others: at least the
    last one is computed, since its scores choose the next. `before`: tokens of prompts that were computed here before it came. `paused`:
    its reader is far behind. `alone`: its next pass may have to wait, so nobody else takes part.
    """

    keys: Sequence[BlockKey]
    known: int
    usable: int
    limit: int
    deadline_ns: int = NEVER_NS
    order: int = 0
    before: int = 0
    state: State = State.WAITING
    table: Table = field(default_factory=lambda: Table(closed=True))
    running: bool = False
    paused: bool = False
    alone: bool = False
    preempted: int = 0

    @property
    def pending(self) -> int:
        """Tokens that lack KV."""
        return self.known - self.table.tokens


@dataclass(frozen=True, slots=True)
class Turn:
    """`work` computes tokens `start` .. `end`-1 in the next pass."""

    work: Work
    start: int
    end: int

    @property
    def last(self) -> bool:
        """Whether the token after them is unknown, and their scores choose it."""
        return self.end == self.work.known
