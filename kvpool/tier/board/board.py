"""The owner's side of a board: says where its blocks are, and learns who looks at them.

The steps of each change and why their order is enough: `order.py`. What lies where: `layout.py`. A withdrawn block that a reader still
holds keeps its slot, so that the hold goes on to name it, until the owner asks again and nobody holds it any more.
"""

import os
from contextlib import suppress
from typing import Final, Self

import numpy as np

from kvpool.block import BlockKey
from kvpool.errors import ClosedError
from kvpool.tier.board.cells import Cells
from kvpool.tier.board.layout import (
    BUCKET_SLOTS,
    FIELDS,
    KEY,
    LENGTH_BITS,
    NEVER,
    RECORD_BYTES,
    STATE_WORD,
    WORD,
    Flag,
    Shape,
    State,
    encode_header,
    shape_for,
    shift_of,
    tag_of,
)
from kvpool.tier.board.order import Fence
from kvpool.tier.board.sealed import make_memory, reopened_to_read
from kvpool.tier.pages import ask_for_huge_pages

_TAKEN: Final = tuple(bin(mask).count("1") for mask in range(1 << BUCKET_SLOTS))
_FREE: Final = tuple(next((lane for lane in range(BUCKET_SLOTS) if not mask >> lane & 1), -1) for mask in range(1 << BUCKET_SLOTS))
_RECORD_WORDS: Final = RECORD_BYTES // WORD
_LOW: Final = np.uint64(0xFFFF_FFFF)
_HALF: Final = np.uint64(32)
_NOT_UNVERIFIED: Final = NEVER ^ (Flag.UNVERIFIED << LENGTH_BITS)


class Board:
    """One node's board. Not thread-safe: all calls come from one thread, or one event loop.

    `read_fd` can only read and is for passing on; it stays the board's to close. `counters`: `unindexed` (blocks that found no room),
    `touches`, `touches_lost` (written over before they were looked at), `broken_cells` (that claimed more than they can hold).
    """

    def __init__(self, shape: Shape) -> None:
        """See `create`."""
        self.shape = shape
        descriptor, mapping = make_memory("kvpool-board", shape.nbytes, only_writer=True)
        try:
            self.read_fd = reopened_to_read(descriptor)
        finally:
            os.close(descriptor)
        ask_for_huge_pages(np.frombuffer(mapping, np.uint8))
        self._bytes = memoryview(mapping)
        self._words = self._bytes.cast("Q")
        self._all = np.frombuffer(mapping, np.uint64)
        self._tags_word, self._records_word = shape.tags_at // WORD, shape.records_at // WORD
        self._mask = shape.buckets - 1
        self._used = bytearray(shape.buckets)
        self._slots: dict[bytes, int] = {}
        self._doomed: dict[bytes, list[int]] = {}
        self._cells = Cells()
        self._fence = Fence()
        self._counters = dict.fromkeys(("unindexed", "touches", "touches_lost"), 0)
        self._closed = False
        header = encode_header(shape)
        self._bytes[: len(header)] = header
        self._words[STATE_WORD] = State.LIVE

    @classmethod
    def create(cls, node_id: str, incarnation: int, *, max_blocks: int, capacity: int) -> Self:
        """A board for node `node_id` (32 hex digits): up to `max_blocks` blocks in `capacity` bytes of arena. Raises `ConfigError`."""
        return cls(shape_for(node_id, incarnation, max_blocks, capacity))

    @property
    def counters(self) -> dict[str, int]:
        """A copy of the counters."""
        return {**self._counters, "broken_cells": self._cells.broken}

    def __len__(self) -> int:
        """Blocks on the board."""
        return len(self._slots)

    def publish(self, key: BlockKey, offset: int, length: int, *, expires_ns: int = 0, flags: int = 0) -> bool:
        """Readers find this block from now on; its bytes are in place. `expires_ns`: monotonic, 0 never.

        A key that is here already is replaced. False when both its buckets are full: then readers just don't find it here.
        """
        words, fields = self._words, KEY.unpack(key)
        slot = self._slots.get(key)
        if slot is None:
            slot = self._take_slot(fields)
            if slot < 0:
                self._counters["unindexed"] += 1
                return False
        at = self._records_word + slot * _RECORD_WORDS
        odd = words[at] | 1
        words[at] = odd
        FIELDS.pack_into(self._bytes, (at + 1) * WORD, offset, length | flags << LENGTH_BITS, expires_ns or NEVER, *fields)
        words[at] = odd + 1
        if key not in self._slots:
            self._slots[key] = slot
            words[self._tags_word + slot // BUCKET_SLOTS] |= tag_of(fields[0]) << shift_of(slot)
        return True

    def withdraw(self, key: BlockKey) -> bool:
        """Readers don't find it any more, and no copy that isn't finished counts. A key that isn't here: False.

        True: somebody holds it now, or one of this key that was withdrawn before; its bytes must stay until `held` says False. False: they
        may be given to others at once.
        """
        slot = self._slots.pop(key, None)
        if slot is None:
            return False
        words, bucket = self._words, slot // BUCKET_SLOTS
        words[self._records_word + slot * _RECORD_WORDS] += 1
        words[self._tags_word + bucket] &= ~(0xFFFF << shift_of(slot))
        self._fence()
        if self._cells.hold(slot):
            self._doomed.setdefault(key, []).append(slot)
            return True
        self._used[bucket] ^= 1 << slot % BUCKET_SLOTS
        return key in self._doomed and self._still_doomed(key)

    def held(self, key: BlockKey) -> bool:
        """Whether somebody holds this block, or one of this key that was withdrawn under holds."""
        slot = self._slots.get(key)
        if slot is not None and self._cells.hold(slot):
            return True
        return key in self._doomed and self._still_doomed(key)

    def verified(self, key: BlockKey) -> None:
        """Its payload has been checked: readers need not any more. Nothing else about it changes."""
        slot = self._slots.get(key)
        if slot is not None:
            self._words[self._records_word + slot * _RECORD_WORDS + 2] &= _NOT_UNVERIFIED

    def attach(self, cell_fd: int) -> int:
        """Look at this cell from now on; returns its number. The descriptor stays the caller's and may be closed.

        Raises `ConfigError` when it is no cell or may be truncated, or there are too many.
        """
        self._check_open()
        return self._cells.attach(cell_fd)

    def detach(self, number: int) -> None:
        """The process of this cell is gone: its holds are, too. An unknown number is no error."""
        self._cells.detach(number)

    def touched(self, limit: int) -> list[BlockKey]:
        """Up to `limit` uses by readers since the last call, of blocks that are still where they were; oldest first within a cell."""
        entries, lost = self._cells.drain(limit)
        self._counters["touches_lost"] += lost
        if not entries.size:
            return []
        slots = (entries & _LOW).astype(np.int64)
        here = slots < self.shape.slots
        at = self._records_word + slots[here] * _RECORD_WORDS
        now = self._all[at]
        same = ((now & _LOW) == entries[here] >> _HALF) & (now & np.uint64(1) == 0) & (now > 0)
        begins = ((at[same] + 4) * WORD).tolist()
        self._counters["touches"] += len(begins)
        return [BlockKey(bytes(self._bytes[begin : begin + KEY.size])) for begin in begins]

    def holding(self) -> int:
        """Holds over all cells."""
        return self._cells.holding()

    def close(self) -> None:
        """Retire the board: readers that have it mapped find nothing from now on. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._words[STATE_WORD] = State.RETIRED
        self._fence()
        self._cells.clear()
        self._slots.clear()
        self._doomed.clear()
        with suppress(OSError):
            os.close(self.read_fd)

    def _take_slot(self, fields: tuple[int, ...]) -> int:
        """A free slot in the emptier of the key's buckets; -1: both are full."""
        self._check_open()
        slot = self._find_slot(fields)
        if slot < 0 and self._doomed:
            for key in list(self._doomed):
                self._still_doomed(key)
            slot = self._find_slot(fields)
        return slot

    def _find_slot(self, fields: tuple[int, ...]) -> int:
        first, second = fields[1] & self._mask, fields[2] & self._mask
        used = self._used
        bucket = first if _TAKEN[used[first]] <= _TAKEN[used[second]] else second
        lane = _FREE[used[bucket]]
        if lane < 0:
            return -1
        used[bucket] |= 1 << lane
        return bucket * BUCKET_SLOTS + lane

    def _still_doomed(self, key: BlockKey) -> bool:
        """Frees the slots of withdrawn blocks of this key that nobody holds any more; whether one is left."""
        left = []
        for slot in self._doomed[key]:
            if self._cells.hold(slot):
                left.append(slot)
            else:
                self._used[slot // BUCKET_SLOTS] ^= 1 << slot % BUCKET_SLOTS
        if left:
            self._doomed[key] = left
        else:
            del self._doomed[key]
        return bool(left)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this board is closed")
