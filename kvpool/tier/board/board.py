"""The owner's side of a board: says where its blocks are, and learns who looks at them.

The steps of each change and why their order is enough: `order.py`. What lies where: `layout.py`. A withdrawn block that a reader still
holds keeps its slot, so that the hold goes on to name it, until the owner asks again and nobody holds it any more.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Final, Self

import numpy as np

from kvpool.block import BlockKey
from kvpool.errors import ClosedError, ConfigError
from kvpool.tier.board.cells import Cells
from kvpool.tier.board.layout import (
    BUCKET_SLOTS,
    FIELDS,
    KEY,
    LANE_FLIP,
    LENGTH_BITS,
    NEVER,
    NO_TAG,
    RECORD_BYTES,
    STATE_WORD,
    TAG_MASK,
    WORD,
    Flag,
    Shape,
    State,
    encode_header,
    shape_for,
)
from kvpool.tier.board.order import Fence
from kvpool.tier.board.sealed import make_memory, reopened_to_read
from kvpool.tier.pages import Bytes, ask_for_huge_pages, populate

_FULL: Final = (1 << BUCKET_SLOTS) - 1
_TAKEN: Final = tuple(mask.bit_count() for mask in range(_FULL + 1))
_FREE: Final = tuple(next(lane for lane in range(BUCKET_SLOTS) if not mask >> lane & 1) for mask in range(_FULL))
_RECORD_WORDS: Final = RECORD_BYTES // WORD
_LOW: Final = np.uint64(0xFFFF_FFFF)
_HALF: Final = np.uint64(32)
_ONE: Final = np.uint64(1)
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
        _fault_in(np.frombuffer(mapping, np.uint8))
        self._bytes = memoryview(mapping)
        self._words = self._bytes.cast("Q")
        self._records = np.frombuffer(mapping, np.uint64, shape.slots * _RECORD_WORDS, shape.records_at).reshape(-1, _RECORD_WORDS)
        self._tags = self._bytes[shape.tags_at : shape.records_at].cast("H")
        np.frombuffer(self._tags, np.uint16)[:] = NO_TAG
        self._first = shape.records_at // WORD
        self._mask = shape.buckets - 1
        self._used = bytearray(shape.buckets)
        self._slots: dict[BlockKey, int] = {}
        self._doomed: dict[BlockKey, list[int]] = {}
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
        """`publish_all` of one block; False when it found no room."""
        self.publish_all([(key, offset, length, expires_ns, flags)])
        return key in self._slots

    def publish_all(self, blocks: Iterable[tuple[BlockKey, int, int, int, int]]) -> None:
        """Readers find these blocks from now on; their bytes are in place. Each is (key, offset, length, expires_ns, flags); `expires_ns`:
        monotonic, 0 never. Where both its buckets are full readers just don't find a block here.

        A key that is here already is told anew; nobody asks who holds its bytes, so withdraw it first when they may go.
        Raises `ConfigError` for 2**48 bytes and more, `ClosedError`.
        """
        self._check_open()
        words, tags, slots, memory, first = self._words, self._tags, self._slots, self._bytes, self._first
        for key, offset, length, expires_ns, flags in blocks:
            if length >> LENGTH_BITS:
                raise ConfigError(f"a block of {length} bytes is longer than a board can say")
            fields = KEY.unpack(key)
            slot = slots.get(key)
            if slot is None:
                slot = self._take_slot(fields[1], fields[2])
                if slot < 0:
                    self._counters["unindexed"] += 1
                    continue
                slots[key] = slot
            at = first + slot * _RECORD_WORDS
            odd = words[at] | 1
            words[at] = odd
            FIELDS.pack_into(memory, at * WORD + WORD, offset, length | flags << LENGTH_BITS, expires_ns or NEVER, *fields)
            words[at] = odd + 1
            tags[slot ^ LANE_FLIP] = fields[0] & TAG_MASK

    def withdraw(self, key: BlockKey) -> bool:
        """Readers don't find it any more, and no copy that isn't finished counts. A key that isn't here: False.

        True: somebody holds it now, or one of this key that was withdrawn before; its bytes must stay until `held` says False. False: they
        may be given to others at once.
        """
        return key in self._slots and bool(self.withdraw_all([key]))

    def withdraw_all(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Readers don't find these any more, and no copy that isn't finished counts; which of them somebody holds, now or since an
        earlier withdrawal: as `held` would say. The bytes of all others may be given away at once.
        """
        words, tags, slots, first, used, doomed = self._words, self._tags, self._slots, self._first, self._used, self._doomed
        gone: list[tuple[BlockKey, int]] = []
        for key in keys:
            slot = slots.pop(key, None)
            if slot is not None:
                words[first + slot * _RECORD_WORDS] += 1
                tags[slot ^ LANE_FLIP] = NO_TAG
                gone.append((key, slot))
        self._fence()
        watched = self._cells.watched()
        for key, slot in gone:
            if watched and self._cells.hold(slot):
                doomed.setdefault(key, []).append(slot)
            else:
                used[slot // BUCKET_SLOTS] ^= 1 << slot % BUCKET_SLOTS
        return {key for key in keys if key in doomed and self._still_doomed(key)} if doomed else set()

    def watched(self) -> bool:
        """Whether anybody holds anything."""
        return self._cells.watched()

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
            self._words[self._first + slot * _RECORD_WORDS + 2] &= _NOT_UNVERIFIED

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
        slots = slots[here]
        now = self._records[slots, 0]
        same = ((now & _LOW) == entries[here] >> _HALF) & (now & _ONE == 0) & (now > 0)
        raw = self._records[slots[same], 4:].tobytes()
        self._counters["touches"] += len(raw) // KEY.size
        return [BlockKey(raw[at : at + KEY.size]) for at in range(0, len(raw), KEY.size)]

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
        os.close(self.read_fd)

    def _take_slot(self, first: int, second: int) -> int:
        """A free slot in the emptier of a key's buckets, which these words of it choose; -1: both are full."""
        used, one, other = self._used, first & self._mask, second & self._mask
        bucket = one if _TAKEN[used[one]] <= _TAKEN[used[other]] else other
        if used[bucket] == _FULL and self._doomed:
            for key in list(self._doomed):
                self._still_doomed(key)
            bucket = one if _TAKEN[used[one]] <= _TAKEN[used[other]] else other
        if used[bucket] == _FULL:
            return -1
        lane = _FREE[used[bucket]]
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


def _fault_in(memory: Bytes) -> None:
    """Records lie all over a board, so that in time each page is written to; the first time takes longer than all else about a record."""
    ask_for_huge_pages(memory)
    try:
        populate(memory)
    except OSError as error:
        raise ConfigError(f"can't take {memory.size} bytes of shared memory for a board: {error.strerror}") from error
