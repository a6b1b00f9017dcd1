"""Who wants which block kept, how firmly, and until when.

A pin belongs to (block, owner): pinning again replaces it. A *soft* pin puts a block behind all others in the order of eviction, a
*hard* pin holds its bytes like a lease. Each ends at its own deadline, by `unpin`, or with its block (a corrupt block is dropped
whatever is pinned). The table is bounded; what hard pins may hold is bounded by its user.
"""

from collections.abc import Iterator

from kvpool.block import KEY_BYTES, BlockKey
from kvpool.pool.deadlines import Deadlines
from kvpool.pool.values import Pin


class Pins:
    """The live pins, by block and by deadline."""

    __slots__ = ("_by_key", "_deadlines", "_total")

    def __init__(self) -> None:
        self._by_key: dict[BlockKey, dict[str, Pin]] = {}
        self._deadlines: Deadlines[bytes] = Deadlines()  # by key + owner
        self._total = 0

    def of(self, key: BlockKey) -> tuple[Pin, ...]:
        """The pins of a block, the oldest first."""
        return tuple(self._by_key.get(key, {}).values())

    def get(self, key: BlockKey, owner: str) -> Pin | None:
        """One owner's pin of a block."""
        return self._by_key.get(key, {}).get(owner)

    def set(self, key: BlockKey, pin: Pin) -> None:
        """Add a pin, or replace the one its owner has."""
        pins = self._by_key.setdefault(key, {})
        self._total += pin.owner not in pins
        pins[pin.owner] = pin
        self._deadlines.set(key + pin.owner.encode(), pin.deadline_ns)

    def drop(self, key: BlockKey, owner: str) -> Pin | None:
        """Take one pin out; None when there is none."""
        pins = self._by_key.get(key)
        pin = pins.pop(owner, None) if pins is not None else None
        if pins is None or pin is None:
            return None
        if not pins:
            del self._by_key[key]
        self._deadlines.drop(key + owner.encode())
        self._total -= 1
        return pin

    def first_deadline_ns(self) -> int:
        """The earliest deadline, far away without any."""
        return self._deadlines.first_ns()

    def pop_due(self, now_ns: int) -> tuple[BlockKey, Pin] | None:
        """Take out a pin whose deadline has come, the earliest first."""
        name = self._deadlines.pop_due(now_ns)
        if name is None:
            return None
        key = BlockKey(name[:KEY_BYTES])
        pin = self.drop(key, name[KEY_BYTES:].decode())
        assert pin is not None
        return key, pin

    def __iter__(self) -> Iterator[BlockKey]:
        """Every pinned block."""
        return iter(self._by_key)

    def __len__(self) -> int:
        return self._total
