"""Event messages: generated protobuf <-> plain values of `kvpool.request.events`.

Blocks go in columns, keys and parents end to end: encoding thousands of them must not hold a node up.
"""

from collections.abc import Iterator
from math import isfinite

from kvpool.block import KEY_BYTES, BlockKey
from kvpool.request.events import MAX_BATCH, NO_PRESSURE, TIER_NAMES, EventBatch, Pressure, Stored
from kvpool.wire.gen import events_pb2 as pb

_NO_PARENT = BlockKey(bytes(KEY_BYTES))


def batch_to_pb(batch: EventBatch) -> pb.EventBatch:
    """Spell a batch."""
    stored = batch.stored
    return pb.EventBatch(
        incarnation=batch.incarnation,
        after=batch.after,
        sequence=batch.sequence,
        keys=b"".join([one[0] for one in stored]),
        parents=b"".join([one[1] or _NO_PARENT for one in stored]),
        depths=[one[2] for one in stored],
        tiers=bytes([one[3] for one in stored]),
        removed=b"".join(batch.removed),
        part=batch.part,
        last=batch.last,
        pressure=None if batch.pressure == NO_PRESSURE else pb.Pressure(free=batch.pressure.free, price=batch.pressure.price),
    )


def batch_from_pb(message: pb.EventBatch) -> EventBatch:
    """Read a batch; `ValueError` for one that can't be."""
    count, rest = divmod(len(message.keys), KEY_BYTES)
    gone, odd = divmod(len(message.removed), KEY_BYTES)
    if rest or odd or len(message.parents) != len(message.keys) or not len(message.depths) == len(message.tiers) == count:
        raise ValueError("columns of different lengths")
    if count + gone > MAX_BATCH:
        raise ValueError(f"{count + gone} blocks in one batch, {MAX_BATCH} at most")
    if not set(message.tiers) <= TIER_NAMES.keys():
        raise ValueError("a tier we don't know")
    pressure = Pressure(message.pressure.free, message.pressure.price)
    if not isfinite(pressure.price) or pressure.price < 0:
        raise ValueError("a price that is none")
    stored: list[Stored] = [
        (key, None if parent == _NO_PARENT else parent, depth, tier)
        for key, parent, depth, tier in zip(_split(message.keys), _split(message.parents), message.depths, message.tiers, strict=True)
    ]
    return EventBatch(
        incarnation=message.incarnation,
        after=message.after,
        sequence=message.sequence,
        stored=tuple(stored),
        removed=tuple(_split(message.removed)),
        part=message.part,
        last=message.last,
        pressure=pressure,
    )


def _split(column: bytes) -> Iterator[BlockKey]:
    return (BlockKey(column[at : at + KEY_BYTES]) for at in range(0, len(column), KEY_BYTES))
