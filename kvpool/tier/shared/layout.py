"""What lies where in a shared region, byte for byte: a superblock, a table of slots, and the records' bytes.

All integers are little-endian; every offset is relative, so each host may map the region elsewhere. Superblock, at byte 0:

    offset  bytes  field
         0      8  magic "KVPSHARE"
         8      4  format version (1)
        12      4  state: 1 starting, 2 live, 3 retired
        16     16  node id
        32      8  incarnation
        40      8  epoch: grows with every owner the region had
        48      8  slots; the table starts at byte 4096
        56      8  data offset: where records' bytes start
        64      8  capacity, bytes of records
        72      4  crc32c of bytes 0..72

A slot, 256 bytes, four cache lines. The first line changes with the state; the others are written once per record:

         0      8  generation: grows whenever the slot changes hands
         8      4  state: 0 free, 1 busy, 2 ready
        12      4  crc32c of the whole slot with this field zero
        16      8  epoch of the superblock it was written under
        24      8  offset of the record's bytes, from the data offset
        32      8  length
        40      8  xxh3-64 of the bytes
        48      8  expires, unix ms, 0 never
        56      8  depth, tokens
        64     32  key
        96     32  parent
       128      8  sequence, tokens
       136      1  1 when there is a parent
       137      1  length of the tenant's name
       138    118  tenant's name, UTF-8

A key may lie in any slot of two buckets of eight that its own bytes choose (two-choice hashing), so a look-up reads 4 KiB at most and a
removed record leaves no tombstone. The table has twice as many slots as records are allowed; at half full, two full buckets are not met.
"""

import struct
from enum import IntEnum
from typing import Final, NamedTuple

import google_crc32c

from kvpool.block import BlockKey
from kvpool.errors import ConfigError, FrameError
from kvpool.tier.contract import Entry

MAGIC: Final = b"KVPSHARE"
FORMAT: Final = 1
SUPERBLOCK_BYTES: Final = 128
TABLE_OFFSET: Final = 4096
SLOT_BYTES: Final = 256
LINE: Final = 64
BUCKET_SLOTS: Final = 8
BUCKET_BYTES: Final = BUCKET_SLOTS * SLOT_BYTES
TENANT_BYTES: Final = 118
"""The longest tenant name that fits; records of tenants with longer ones are not shared."""

KEY_AT: Final = 64
_SUPER: Final = struct.Struct("<8sII16sQQQQQ")
_SLOT: Final = struct.Struct("<QIIQQQQQQ32s32sQBB118s")
_CRC: Final = struct.Struct("<I")
_CRC_AT: Final = 12


class RegionState(IntEnum):
    """Where the owner is in its life."""

    STARTING = 1
    LIVE = 2
    RETIRED = 3


class SlotState(IntEnum):
    """Where a slot's record is in its life."""

    FREE = 0
    BUSY = 1
    READY = 2


class Shape(NamedTuple):
    """Identity and sizes of a shared region, as its superblock tells them. `node_id` is 16 bytes."""

    node_id: bytes
    incarnation: int
    epoch: int
    slots: int
    data_offset: int
    capacity: int

    @property
    def buckets(self) -> int:
        """Groups of `BUCKET_SLOTS`."""
        return self.slots // BUCKET_SLOTS

    @property
    def region_bytes(self) -> int:
        """Bytes of the whole region."""
        return self.data_offset + self.capacity


class Slot(NamedTuple):
    """One record as the table tells it."""

    generation: int
    state: SlotState
    epoch: int
    offset: int
    checksum: int
    entry: Entry


def slots_for(max_objects: int) -> int:
    """Slots of a table for `max_objects` records."""
    return max(2, -(-2 * max_objects // BUCKET_SLOTS)) * BUCKET_SLOTS


def data_offset_for(slots: int) -> int:
    """Where records start behind a table of `slots`; a multiple of 4096."""
    return TABLE_OFFSET + -(-slots * SLOT_BYTES // 4096) * 4096


def slot_at(index: int) -> int:
    """Offset of slot `index` in the region."""
    return TABLE_OFFSET + index * SLOT_BYTES


def buckets_of(key: BlockKey, buckets: int) -> tuple[int, int]:
    """The two buckets, of `buckets` >= 2, where `key` may lie; never twice the same."""
    first = int.from_bytes(key[:8], "little") % buckets
    return first, (first + 1 + int.from_bytes(key[8:16], "little") % (buckets - 1)) % buckets


def encode_superblock(shape: Shape, state: RegionState) -> bytes:
    """`SUPERBLOCK_BYTES` bytes. Raises `ConfigError` for an incarnation that is no 64-bit number or sizes below one."""
    if not 0 <= shape.incarnation < 1 << 64 or shape.capacity < 1 or len(shape.node_id) != 16:
        raise ConfigError("a shared region needs a 16-byte node id, an incarnation of 64 bits and a capacity above zero")
    body = _SUPER.pack(MAGIC, FORMAT, state, *shape)
    return (body + _CRC.pack(google_crc32c.value(body))).ljust(SUPERBLOCK_BYTES, b"\0")


def decode_superblock(raw: bytes, region_bytes: int) -> tuple[Shape, RegionState]:
    """Raises `FrameError` on a wrong magic, version or checksum, and on values that don't fit a region of `region_bytes`."""
    magic, version, state, *rest = _SUPER.unpack_from(raw)
    if magic != MAGIC:
        raise FrameError("not a shared tier: wrong magic")
    if version != FORMAT:
        raise FrameError(f"shared tier format {version}, this build reads format {FORMAT}: run the same version on both sides")
    if _CRC.unpack_from(raw, _SUPER.size)[0] != google_crc32c.value(raw[: _SUPER.size]):
        raise FrameError("a shared tier's superblock is damaged: wrong checksum")
    shape = Shape(*rest)
    sound = shape.slots >= 2 * BUCKET_SLOTS and shape.slots % BUCKET_SLOTS == 0 and shape.data_offset >= slot_at(shape.slots)
    if not sound or shape.capacity < 1 or shape.region_bytes > region_bytes or state not in list(RegionState):
        raise FrameError(f"a shared tier's superblock can't be: {shape}, state {state}, in {region_bytes} bytes")
    return shape, RegionState(state)


def encode_slot(slot: Slot) -> bytes:
    """`SLOT_BYTES` bytes. The tenant's name must fit."""
    entry, tenant = slot.entry, slot.entry.tenant.encode()
    raw = bytearray(
        _SLOT.pack(
            *(slot.generation, slot.state, 0, slot.epoch, slot.offset, entry.length, slot.checksum, entry.expires_ms, entry.depth),
            *(entry.key, entry.parent or b"", entry.sequence, entry.parent is not None, len(tenant), tenant),
        )
    )
    _CRC.pack_into(raw, _CRC_AT, google_crc32c.value(bytes(raw)))
    return bytes(raw)


def decode_slot(raw: bytes) -> Slot | None:
    """The slot, None for one that is free, torn or damaged."""
    generation, state, crc, epoch, offset, length, checksum, expires_ms, depth, *rest = _SLOT.unpack(raw)
    if state not in (SlotState.BUSY, SlotState.READY) or google_crc32c.value(raw[:_CRC_AT] + bytes(4) + raw[_CRC_AT + 4 :]) != crc:
        return None
    key, parent, sequence, has_parent, tenant_length, tenant = rest
    name = tenant[:tenant_length].decode(errors="replace")
    entry = Entry(BlockKey(key), BlockKey(parent) if has_parent else None, depth, length, expires_ms, sequence, name)
    return Slot(generation, SlotState(state), epoch, offset, checksum, entry)
