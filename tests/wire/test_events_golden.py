"""Wire bytes of events, pinned: messages encoded by hand must decode to our values and back. Literals are append-only."""

import struct

import pytest

from kvpool.block import BlockKey
from kvpool.request.events import BELOW, DRAM, MAX_BATCH, EventBatch, Pressure
from kvpool.wire.convert_events import batch_from_pb, batch_to_pb
from kvpool.wire.gen import events_pb2

A, B, C = (BlockKey(bytes([fill]) * 32) for fill in (0x11, 0x22, 0x33))


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def blob(field: int, data: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(data)) + data


CHANGES = (
    number(1, 1_700_000_000_000_000) + number(2, 300) + number(3, 303) + blob(4, A + B) + blob(5, bytes(32) + A)
    + blob(6, varint(0) + varint(4096)) + blob(7, b"\x01\x03") + blob(8, C)
)  # fmt: skip
PART = number(1, 9) + number(2, 5) + number(3, 5) + blob(4, A) + blob(5, bytes(32)) + blob(6, b"\x00") + blob(7, b"\x01") + number(9, 2)


def test_watch_requests_on_the_wire() -> None:
    """incarnation 1, sequence 2; both absent: a new consumer."""
    assert events_pb2.WatchRequest(incarnation=7, sequence=300).SerializeToString() == number(1, 7) + number(2, 300)
    assert events_pb2.WatchRequest.FromString(b"") == events_pb2.WatchRequest(incarnation=0, sequence=0)


def test_batches_of_changes_on_the_wire() -> None:
    """Columns: keys 4, parents 5 (zeros: none), depths 6 packed, tiers 7, removed 8."""
    value = batch_from_pb(events_pb2.EventBatch.FromString(CHANGES))
    assert value == EventBatch(
        incarnation=1_700_000_000_000_000,
        after=300,
        sequence=303,
        stored=((A, None, 0, DRAM), (B, A, 4096, BELOW)),
        removed=(C,),
    )
    assert batch_to_pb(value).SerializeToString(deterministic=True) == CHANGES


def test_parts_and_keep_alives_on_the_wire() -> None:
    """part 9, last 10; a keep-alive is three numbers."""
    value = batch_from_pb(events_pb2.EventBatch.FromString(PART + number(10, 1)))
    assert value == EventBatch(incarnation=9, after=5, sequence=5, stored=((A, None, 0, DRAM),), part=2, last=True)
    assert batch_to_pb(value).SerializeToString(deterministic=True) == PART + number(10, 1)
    quiet = EventBatch(incarnation=9, after=5, sequence=5)
    assert batch_to_pb(quiet).SerializeToString(deterministic=True) == number(1, 9) + number(2, 5) + number(3, 5)


def test_pressure_on_the_wire() -> None:
    """free 1, price 2 (a double); who doesn't say presses with nothing."""
    told = number(1, 9) + number(2, 5) + number(3, 5) + blob(11, number(1, 300) + varint(2 << 3 | 1) + struct.pack("<d", 0.25))
    value = EventBatch(incarnation=9, after=5, sequence=5, pressure=Pressure(300, 0.25))
    assert batch_from_pb(events_pb2.EventBatch.FromString(told)) == value
    assert batch_to_pb(value).SerializeToString(deterministic=True) == told


@pytest.mark.parametrize("price", [-0.5, float("nan"), float("inf")])
def test_price_that_is_none_is_no_batch(price: float) -> None:
    """A router reckons with it."""
    with pytest.raises(ValueError, match="a price that is none"):
        batch_from_pb(events_pb2.EventBatch(pressure=events_pb2.Pressure(price=price)))


@pytest.mark.parametrize("column", [4, 5, 7, 8])
@pytest.mark.parametrize("change", [-1, 1])
def test_column_of_another_length_is_no_batch(column: int, change: int) -> None:
    """One byte short or long must not shift one block's parent to another."""
    message = events_pb2.EventBatch.FromString(CHANGES)
    name = {4: "keys", 5: "parents", 7: "tiers", 8: "removed"}[column]
    value = getattr(message, name)
    setattr(message, name, value[:-1] if change < 0 else value + value[:1])
    with pytest.raises(ValueError, match="columns of different lengths"):
        batch_from_pb(message)


def test_depths_missing_are_no_batch() -> None:
    """The packed column has its own length."""
    message = events_pb2.EventBatch.FromString(CHANGES)
    message.depths.append(1)
    with pytest.raises(ValueError, match="columns of different lengths"):
        batch_from_pb(message)


def test_largest_batch_fits_a_mebibyte() -> None:
    """What a node sends at once is bounded in bytes, whatever the depths."""
    stored = tuple((BlockKey(bytes([7]) * 32), A, 2**32 - 1, DRAM) for _ in range(MAX_BATCH))
    raw = batch_to_pb(EventBatch(incarnation=2**63, after=2**62, sequence=2**62, stored=stored, part=2**31)).SerializeToString()
    assert len(raw) < 300_000
