"""A board in memory: what a pool announces, and the holds of readers who came without asking.

It is strict about what a pool may do: a key is published once until it is withdrawn, and what is withdrawn was published (or had no room).
A *hold* is on what one publication said, its bytes; it outlives the withdrawal, like a hold in a cell.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvpool.block import BlockKey
from kvpool.errors import LocalError
from kvpool.pool.resident import Resident


class Record(NamedTuple):
    """What a board says of one block."""

    key: BlockKey
    offset: int
    length: int
    expires_ns: int
    unverified: bool


class BoardTwin:
    """An `Announcer`. `room`: records it has room for; more are left out."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.records: dict[BlockKey, Record] = {}
        self.holds: dict[int, Record] = {}
        """Live holds by number."""
        self.late: set[BlockKey] = set()
        """Keys that a reader begins to hold between the pool's last look and its withdrawal of them, which drops them from here."""
        self.room = room
        self._last = 0

    # The pool's side

    def publish(self, blocks: Sequence[Resident]) -> None:
        """See `Announcer`."""
        for block in blocks:
            if block.key in self.records:
                raise LocalError(f"{block.key.hex()} was published twice")
            if len(self.records) < self.room:
                self.records[block.key] = Record(block.key, *block.location, block.expires_ns, block.unverified)

    def verified(self, key: BlockKey) -> None:
        """See `Announcer`."""
        if key in self.records:
            self.records[key] = self.records[key]._replace(unverified=False)

    def withdraw(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """See `Announcer`."""
        for key in keys:
            if key in self.late:
                self.late.discard(key)
                self.hold(key)
            self.records.pop(key, None)
        return set(filter(self.held, keys))

    def held(self, key: BlockKey) -> bool:
        """See `Announcer`."""
        return bool(self.holds) and any(record.key == key for record in self.holds.values())

    def watched(self) -> bool:
        """See `Announcer`."""
        return bool(self.holds)

    # A reader's side

    def hold(self, key: BlockKey) -> int:
        """Hold what the board says of `key`; the hold's number, 0 when there is no record."""
        record = self.records.get(key)
        if record is None:
            return 0
        self._last += 1
        self.holds[self._last] = record
        return self._last

    def release(self, number: int) -> None:
        """The reader looks no more."""
        del self.holds[number]
