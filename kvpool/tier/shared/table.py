"""The owner's side of a shared region: the slot table that tells readers elsewhere what lies where.

Theory. One writer, any number of readers, no lock between them. The order of the steps is all there is:

    put      slot := busy, flush | payload, flush | slot := ready, flush
    remove   slot := free, flush | only then the room is used again
    start    superblock := starting, flush | every slot := 0, flush | superblock := live, flush
    end      superblock := retired, flush

A reader that finds a slot ready therefore finds its payload flushed, and one that finds the slot unchanged after it copied the payload has
copied that record's bytes (a seqlock). An owner that dies between any two steps leaves a slot that is busy or torn, and those are misses.
Each change of hands has another generation, each owner another epoch, so no slot ever looks as it did before.
"""

from typing import Final

import numpy as np

from kvpool.block import BlockKey
from kvpool.errors import FrameError
from kvpool.tier.contract import Entry, Record, entry_of
from kvpool.tier.pages import Bytes
from kvpool.tier.region import Region
from kvpool.tier.shared.layout import (
    BUCKET_SLOTS,
    LINE,
    SLOT_BYTES,
    SUPERBLOCK_BYTES,
    TABLE_OFFSET,
    TENANT_BYTES,
    RegionState,
    Shape,
    Slot,
    SlotState,
    buckets_of,
    data_offset_for,
    decode_superblock,
    encode_slot,
    encode_superblock,
    slot_at,
    slots_for,
)
from kvpool.units import MIB

_U64: Final = 1 << 64
_STEP: Final = MIB
_NOBODY: Final = Entry(BlockKey(bytes(32)), None, 0, 0)


class SlotTable:
    """`Catalog` in a region that this owner alone writes. What was in the region before is not read again."""

    def __init__(self, region: Region, *, capacity: int, max_objects: int, node_id: bytes, incarnation: int, now_ns: int) -> None:
        """Makes the region this owner's: `capacity` bytes of records, up to `max_objects`. `now_ns`: unix time, for an epoch never had.

        Raises `ConfigError` when the region is too small, `OSError` when its memory fails.
        """
        slots = slots_for(max_objects)
        epoch = max(_epoch_before(region) + 1, now_ns)
        self.shape = Shape(node_id, incarnation, epoch, slots, data_offset_for(slots), capacity)
        self._region = region
        self._taken = bytearray(slots)
        self._generations = np.zeros(slots, np.uint64)
        self._busy: dict[int, Slot] = {}
        self._announce(RegionState.STARTING)
        self._clear()
        self._announce(RegionState.LIVE)

    def claim(self, record: Record, offset: int, checksum: int) -> int | None:
        """See `Catalog.claim`. None also for a tenant's name or a number that no slot can hold."""
        fits = len(record.tenant.encode()) <= TENANT_BYTES and max(record.depth, record.sequence, record.expires_ms) < _U64
        index = self._free_slot(record.key) if fits else None
        if index is None:
            return None
        slot = Slot(self._next_generation(index), SlotState.BUSY, self.shape.epoch, offset, checksum, entry_of(record))
        self._taken[index] = 1
        self._busy[index] = slot
        self._write(slot_at(index), encode_slot(slot))
        return index

    def publish(self, slot: int) -> None:
        """See `Catalog.publish`. Only the first line changes."""
        ready = self._busy[slot]._replace(state=SlotState.READY)
        self._write(slot_at(slot), encode_slot(ready)[:LINE])
        del self._busy[slot]

    def withdraw(self, slot: int) -> None:
        """See `Catalog.withdraw`. A slot whose withdrawal failed isn't given out again."""
        self._busy.pop(slot, None)
        free = Slot(self._next_generation(slot), SlotState.FREE, self.shape.epoch, 0, 0, _NOBODY)
        self._write(slot_at(slot), encode_slot(free)[:LINE])
        self._taken[slot] = 0

    def retire(self) -> None:
        """See `Catalog.retire`."""
        self._announce(RegionState.RETIRED)

    def _announce(self, state: RegionState) -> None:
        self._write(0, encode_superblock(self.shape, state))

    def _clear(self) -> None:
        end, zeros = slot_at(self.shape.slots), np.zeros(_STEP, np.uint8)
        for start in range(TABLE_OFFSET, end, _STEP):
            length = min(_STEP, end - start)
            self._region.write(start, zeros[:length])
            self._region.flush(start, length)

    def _free_slot(self, key: BlockKey) -> int | None:
        """A free slot in the emptier of the key's buckets."""
        starts = [bucket * BUCKET_SLOTS for bucket in buckets_of(key, self.shape.buckets)]
        start = min(starts, key=lambda at: self._taken.count(1, at, at + BUCKET_SLOTS))
        index = self._taken.find(0, start, start + BUCKET_SLOTS)
        return index if index >= 0 else None

    def _next_generation(self, index: int) -> int:
        self._generations[index] += np.uint64(1)
        return int(self._generations[index])

    def _write(self, offset: int, raw: bytes) -> None:
        data: Bytes = np.frombuffer(raw, np.uint8)
        self._region.write(offset, data)
        self._region.flush(offset, data.size)


def _epoch_before(region: Region) -> int:
    """The epoch of the owner before, 0 where there was none."""
    raw = np.zeros(SUPERBLOCK_BYTES, np.uint8)
    region.invalidate(0, SUPERBLOCK_BYTES)
    region.read(0, raw)
    try:
        return decode_superblock(raw.tobytes(), region.capacity)[0].epoch
    except FrameError:
        return 0


def table_bytes(max_objects: int) -> int:
    """Bytes of a region before its records, superblock included: `2 * SLOT_BYTES` a record, rounded up."""
    return data_offset_for(slots_for(max_objects))


METADATA_BYTES_PER_OBJECT: Final = 2 * SLOT_BYTES
"""What one allowed record takes of the region besides its bytes."""
