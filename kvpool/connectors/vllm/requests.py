"""What the scheduler's side remembers of one request."""

from dataclasses import dataclass, field
from typing import Any

from kvpool.connectors.vllm.chains import Names


@dataclass(slots=True)
class Tracked:
    """A request from its first lookup to its end; all counts are in blocks.

    `names`: what its blocks are called, None if it can't be cached. `local`: leading blocks that the engine had at the last lookup.
    `found`: those that the pool had. `saved`: blocks before this one are in the pool, on their way, or given up. `told`: names that the
    ranks know. `spent`: a load of it came short, so it loads nothing any more. `hand_off`: another engine is to go on with it when its
    prompt is computed. `within_step`: its load, if there is one, is for the step to wait for.
    """

    request: Any
    names: Names | None
    hand_off: bool = False
    local: int = 0
    found: int = 0
    saved: int = 0
    told: int = 0
    spent: bool = False
    within_step: bool = False


@dataclass(slots=True)
class Saving:
    """Blocks that a save holds: the engine's block objects, and what is to be said of them once the pool has them."""

    blocks: list[Any]
    reports: list[int] = field(default_factory=list)
    story: "Story | None" = None


@dataclass(frozen=True, slots=True)
class Story:
    """What an event says of saved blocks: the hash before them, theirs, their tokens, and the request's LoRA and extra keys."""

    parent: bytes | None
    hashes: list[bytes]
    tokens: list[int]
    lora: Any
