"""What a policy is told and what it answers: the contract of every file beside this one.

A policy sees events only: a block was inserted, touched, removed. It holds no bytes and decides nothing but an order; whoever
owns the bytes walks `victims()` and passes over what it can't take (leased blocks). So the same object runs in the node, in the
simulator and on a trace. It has no clock: the latest `now_ns` it was told is its present. It doesn't know the capacity either;
parts of a policy that have a size are sized by what it holds now.
"""

from collections.abc import Generator
from typing import Final, NamedTuple, Protocol

from kvpool.block import BlockKey
from kvpool.errors import LocalError
from kvpool.request.pool import DEFAULT_PRIORITY as DEFAULT_PRIORITY

NEVER_NS: Final = 1 << 63
"""A time that doesn't come."""


class Arrival(NamedTuple):
    """A block that has just become visible.

    `depth`: tokens before it in its chain. `length`: bytes of its frame. `sequence`: tokens of the whole prompt it was
    written for, 0 when unknown. `priority`: 0..100, a higher one stays longer; from `priority_until_ns` on the block counts as
    `DEFAULT_PRIORITY`. `expires_ns`: when its ttl runs out. Times are absolute, on the clock of `now_ns`.
    """

    key: BlockKey
    parent: BlockKey | None
    depth: int
    length: int
    sequence: int = 0
    priority: int = DEFAULT_PRIORITY
    priority_until_ns: int = NEVER_NS
    expires_ns: int = NEVER_NS


class EvictionPolicy(Protocol):
    """An order of eviction, fed with events. Keys are those of committed blocks."""

    def inserted(self, arrival: Arrival, now_ns: int) -> None:
        """A block appeared. Several of one batch come tails first, so heads are the younger ones.

        Raises `LocalError` when the key is resident already.
        """
        ...

    def touched(self, key: BlockKey, now_ns: int, sequence: int = 0) -> None:
        """A reader used the block; unknown keys are ignored. Several of one batch come tails first.

        `sequence`: tokens of the reader's whole prompt, 0 when unknown.
        """
        ...

    def removed(self, key: BlockKey) -> None:
        """The block is gone, evicted or otherwise; unknown keys are ignored."""
        ...

    def victims(self) -> Generator[BlockKey, None, None]:
        """Candidates, the first to leave first; each key at most once.

        Between two steps the caller may report `removed` for the key just yielded, and nothing else. It closes the
        generator when it has enough (`contextlib.closing`); candidates it passed over keep their place.
        """
        ...

    def __contains__(self, key: object) -> bool:
        """Whether the policy believes the key to be resident."""
        ...

    def __len__(self) -> int:
        """How many keys the policy believes to be resident."""
        ...


def inserted_twice(key: BlockKey) -> LocalError:
    """The error of a second `inserted` without a `removed` between."""
    name = key.hex() if isinstance(key, bytes) else repr(key)
    return LocalError(f"block {name} inserted twice; report removed() first")
