"""Admin wire bytes, pinned: messages encoded by hand (varints and length prefixes, nothing generated) must decode to our values and back.

Field numbers and types are a promise to tools in other languages. Literals are append-only.
"""

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from kvpool.request import admin as a
from kvpool.wire import convert_admin as convert
from kvpool.wire.gen import admin_pb2 as pb

KEY, PARENT = b"\x11" * 32, b"\x22" * 32


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


INSPECTION = a.Inspection(
    key=KEY,
    tiers=(
        a.TierPlace(name="arena", length=737_472, offset=4096, state="committed"),
        a.TierPlace(name="ssd", length=737_472, offset=0, state="stored"),
    ),
    parent=PARENT,
    depth=16,
    n_tokens=9,
    codec="fp8",
    flags=3,
    size=737_472,
    age_ms=70_000,
    idle_ms=300,
    hits=5,
    ttl_left_ms=0,
    priority=50,
    tenant="team-a",
    leases=(a.LeaseHolder(id=2**40, owner="router", kind="read", left_ms=900),),
    lease_count=70,
    pins=(a.PinHolder(owner="ops", hard=True, left_ms=1_800_000),),
    pin_count=1,
    story=("1 ns: reserved (lease 3)", "2 ns: committed (lease 3)"),
)
INSPECTION_RAW = (
    blob(1, KEY)
    + blob(2, blob(1, b"arena") + number(2, 737_472) + number(3, 4096) + blob(4, b"committed"))
    + blob(2, blob(1, b"ssd") + number(2, 737_472) + blob(4, b"stored"))
    + blob(3, PARENT)
    + number(4, 16)
    + number(5, 9)
    + blob(6, b"fp8")
    + number(7, 3)
    + number(8, 737_472)
    + number(9, 70_000)
    + number(10, 300)
    + number(11, 5)
    + number(12, 0)
    + number(13, 50)
    + blob(14, b"team-a")
    + blob(15, number(1, 2**40) + blob(2, b"router") + blob(3, b"read") + number(4, 900))
    + number(16, 70)
    + blob(17, blob(1, b"ops") + number(2, 1) + number(3, 1_800_000))
    + number(18, 1)
    + blob(19, b"1 ns: reserved (lease 3)")
    + blob(19, b"2 ns: committed (lease 3)")
)
TIER = a.TierReport(
    name="ssd",
    state="read-only",
    reason="EROFS",
    capacity_bytes=2**40,
    used_bytes=300,
    objects=7,
    max_objects=9,
    counters={"corrupt": 1},
)
TIER_RAW = (
    blob(1, b"ssd")
    + blob(2, b"read-only")
    + blob(3, b"EROFS")
    + number(4, 2**40)
    + number(5, 300)
    + number(6, 7)
    + number(7, 9)
    + blob(8, blob(1, b"corrupt") + number(2, 1))
)
QUOTAS = [a.Quota(tenant="a", used_bytes=300, max_bytes=1000), a.Quota(tenant="", used_bytes=5, max_bytes=None)]
QUOTAS_RAW = blob(1, blob(1, b"a") + number(2, 300) + number(3, 1000)) + blob(1, number(2, 5))
GC = a.GcReport(expired_leases=1, expired_blocks=2, orphan_blocks=3, orphan_bytes=4, dead_bytes=5, reclaimed_bytes=600)
GC_RAW = b"".join(number(field, field) for field in range(1, 6)) + number(6, 600)
VERIFY = a.VerifyReport(checked=3, checked_bytes=300, corrupt=(KEY, PARENT), corrupt_count=2, cursor="seg-4:512")
VERIFY_RAW = number(1, 3) + number(2, 300) + blob(3, KEY) + blob(3, PARENT) + number(4, 2) + blob(5, b"seg-4:512")

ANSWERS: dict[str, tuple[bytes, Any, type[Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "inspection": (INSPECTION_RAW, INSPECTION, pb.Inspection, convert.inspection_from_pb, convert.inspection_to_pb),
    "absent": (
        blob(1, KEY) + number(13, 50),
        a.Inspection(key=KEY),
        pb.Inspection,
        convert.inspection_from_pb,
        convert.inspection_to_pb,
    ),
    "evictions": (
        blob(1, b"\x00\x01\x02\x03"),
        [a.EvictOutcome.EVICTED, a.EvictOutcome.ABSENT, a.EvictOutcome.HELD, a.EvictOutcome.PINNED],
        pb.EvictResponse,
        convert.evictions_from_pb,
        convert.evictions_to_pb,
    ),
    "pins": (
        blob(1, b"\x00\x01\x02"),
        [a.PinOutcome.PINNED, a.PinOutcome.ABSENT, a.PinOutcome.REFUSED],
        pb.PinResponse,
        convert.pins_from_pb,
        convert.pins_to_pb,
    ),
    "quotas": (QUOTAS_RAW, QUOTAS, pb.QuotasResponse, convert.quotas_from_pb, convert.quotas_to_pb),
    "gc": (GC_RAW, GC, pb.GcResponse, convert.gc_from_pb, convert.gc_to_pb),
    "verify": (VERIFY_RAW, VERIFY, pb.VerifyResponse, convert.verified_from_pb, convert.verified_to_pb),
    "balance": (
        blob(1, b"draining") + b"".join(number(field, field) for field in range(3, 8)) + blob(8, blob(1, b"pushed") + number(2, 5)),
        a.Balance(state="draining", settled=False, rounds=3, blocks=4, block_bytes=5, safe_blocks=6, safe_bytes=7, counters={"pushed": 5}),
        pb.BalanceResponse,
        convert.balance_from_pb,
        convert.balance_to_pb,
    ),
    "tiers": (blob(1, TIER_RAW), [TIER], pb.TiersResponse, convert.tiers_from_pb, convert.tiers_to_pb),
}


@pytest.mark.parametrize(("raw", "value", "message", "read", "spell"), list(ANSWERS.values()), ids=list(ANSWERS))
def test_answers_on_the_wire(
    raw: bytes, value: object, message: type[Any], read: Callable[[Any], object], spell: Callable[[Any], Any]
) -> None:
    """Both directions agree with the hand-written bytes."""
    assert read(message.FromString(raw)) == value
    assert spell(value).SerializeToString(deterministic=True) == raw


@pytest.mark.parametrize(("raw", "value", "message", "read"), [row[:4] for row in ANSWERS.values()], ids=list(ANSWERS))
def test_answers_cut_short_or_with_a_byte_more_are_noticed(
    raw: bytes, value: object, message: type[Any], read: Callable[[Any], object]
) -> None:
    """A damaged message fails to decode or says something else; it never passes for the whole one."""
    for damaged in (raw[:-1], raw + b"\x07"):
        try:
            assert read(message.FromString(damaged)) != value
        except (DecodeError, ValueError):
            continue


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (blob(1, KEY) + blob(1, PARENT) + number(2, 1), pb.InspectRequest(keys=[KEY, PARENT], story=True)),
        (blob(1, KEY) + number(2, 1), pb.EvictRequest(keys=[KEY], dry_run=True)),
        (
            blob(1, KEY) + number(2, 1) + number(3, 1_800_000) + blob(4, b"ops"),
            pb.PinRequest(keys=[KEY], hard=True, duration_ms=1_800_000, owner="ops"),
        ),
        (blob(1, KEY) + blob(2, b"ops"), pb.UnpinRequest(keys=[KEY], owner="ops")),
        (number(1, 4), pb.UnpinResponse(unpinned=4)),
        (blob(1, b"team") + number(2, 10 << 30), pb.SetQuotaRequest(tenant="team", max_bytes=10 << 30)),
        (number(1, 1), pb.GcRequest(dry_run=True)),
        (blob(1, b"ssd") + blob(2, b"c") + number(3, 1 << 26), pb.VerifyRequest(tier="ssd", cursor="c", max_bytes=1 << 26)),
        (number(1, 1) + number(2, 200 << 20), pb.DrainRequest(cancel=True, bytes_per_s=200 << 20)),
        (number(2, 1), pb.BalanceResponse(settled=True)),
        (blob(1, blob(1, KEY)), pb.InspectResponse(blocks=[pb.Inspection(key=KEY)])),
    ],
)
def test_requests_on_the_wire(raw: bytes, message: Any) -> None:
    """Fields keep their numbers."""
    assert message.SerializeToString(deterministic=True) == raw
    assert type(message).FromString(raw) == message


def test_outcomes_from_the_future_are_not_guessed() -> None:
    """An outcome with a number we don't know is an error, not the nearest one."""
    with pytest.raises(ValueError, match="9"):
        convert.evictions_from_pb(pb.EvictResponse.FromString(blob(1, b"\x09")))
    with pytest.raises(ValueError, match="9"):
        convert.pins_from_pb(pb.PinResponse.FromString(blob(1, b"\x09")))
