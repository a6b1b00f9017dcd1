"""The bytes of the TCP data plane: golden, and refused when they are off by anything."""

import struct

import pytest

from kvpool.errors import AccessError, ConfigError, LimitError, ProtocolError, UnavailableError
from kvpool.transport import Run
from kvpool.transport.tcp import wire
from kvpool.transport.tcp.wire import Kind, Status
from kvpool.units import MIB, SECOND

NODE = "000102030405060708090a0b0c0d0e0f"
HELLO = "4b565054" "0100" "0300" "15cd5b0700000000" "000102030405060708090a0b0c0d0e0f" "746f6b"  # fmt: skip


def test_hello_has_these_bytes() -> None:
    """Version 1 of the wire, for ever."""
    packed = wire.pack_hello(NODE, 123_456_789, "tok")
    assert packed.hex() == HELLO
    assert wire.unpack_hello(packed[: wire.HELLO.size]) == (bytes(range(16)), 123_456_789, 3)


def test_request_and_answers_have_these_bytes() -> None:
    """As above."""
    assert wire.pack_request(Kind.GET, 258, 1_000_000_999).hex() == "02000000" "02010000" "40420f0000000000"  # fmt: skip
    assert wire.pack_answer(7, 65536).hex() == "00000000" "07000000" "0000010000000000"  # fmt: skip
    assert wire.pack_refusal(Status.FULL, "no").hex() == "02000000" "00000000" "0200000000000000" "6e6f"  # fmt: skip
    assert wire.pack_runs([Run(1, 2, 99), Run(3, 4, 0)]) == struct.pack("<4Q", 1, 2, 3, 4)
    assert wire.pack_wants([b"k" * 32, b"l" * 32], [5, 6]) == b"k" * 32 + b"l" * 32 + struct.pack("<2Q", 5, 6)


@pytest.mark.parametrize("kind", list(Kind))
def test_request_survives_its_bytes(kind: Kind) -> None:
    """What was asked is what is answered."""
    assert wire.unpack_request(wire.pack_request(kind, 4096, 3 * SECOND)) == (kind, 4096, 3 * SECOND)


def test_time_of_a_request_is_capped_and_never_none() -> None:
    """A node relies on no write going on for longer; a client that has a nanosecond left still asks."""
    assert wire.unpack_request(wire.pack_request(Kind.WRITE, 1, 3600 * SECOND))[2] == wire.MAX_DEADLINE_NS
    assert wire.unpack_request(wire.pack_request(Kind.WRITE, 1, 1))[2] == 1000


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<B3sIQ", 0, b"\0\0\0", 1, 1), struct.pack("<B3sIQ", 5, b"\0\0\0", 1, 1), struct.pack("<B3sIQ", 1, b"\0\0\1", 1, 1),
        struct.pack("<B3sIQ", 1, b"\0\0\0", 0, 1), struct.pack("<B3sIQ", 1, b"\0\0\0", 4097, 1), struct.pack("<B3sIQ", 1, b"\0\0\0", 1, 0),
    ],
)  # fmt: skip
def test_request_that_cannot_be_is_refused(head: bytes) -> None:
    """No kind, no count, no time, or bytes that mean nothing."""
    with pytest.raises(ProtocolError):
        wire.unpack_request(head)


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<4sHHQ16s", b"HTTP", 1, 0, 0, bytes(16)), struct.pack("<4sHHQ16s", b"KVPT", 2, 0, 0, bytes(16)),
        struct.pack("<4sHHQ16s", b"KVPT", 1, 513, 0, bytes(16)),
    ],
)  # fmt: skip
def test_hello_of_somebody_else_is_refused(head: bytes) -> None:
    """Another protocol, another version, a token that is none."""
    with pytest.raises(ProtocolError):
        wire.unpack_hello(head)


@pytest.mark.parametrize(("status", "error"), [(1, AccessError), (2, LimitError), (3, UnavailableError), (4, ProtocolError)])
def test_refusal_is_raised_as_what_it_is(status: int, error: type[Exception]) -> None:
    """The client's error says whose fault it was."""
    packed = wire.pack_refusal(Status(status), "because")
    told, count, nbytes = wire.unpack_answer(packed[:16])
    assert (told, count, nbytes) == (status, 0, 7)
    raised = wire.refusal(told, packed[16:])
    assert isinstance(raised, error)
    assert str(raised) == "because"


@pytest.mark.parametrize("head", [struct.pack("<B3sIQ", 5, b"\0\0\0", 0, 0), struct.pack("<B3sIQ", 4, b"\0\0\0", 0, 513)])
def test_answer_that_cannot_be_is_refused(head: bytes) -> None:
    """A client trusts a server no more than the other way round."""
    with pytest.raises(ProtocolError):
        wire.unpack_answer(head)


def test_long_reason_is_cut_and_bad_identity_refused() -> None:
    """What goes out is bounded, too."""
    assert len(wire.pack_refusal(Status.BROKEN, "x" * 10_000)) == wire.ANSWER.size + wire.MAX_TEXT_BYTES
    with pytest.raises(ConfigError):
        wire.pack_hello("short", 1, "")
    with pytest.raises(ConfigError):
        wire.pack_hello(NODE, 1, "x" * 513)


@pytest.mark.parametrize("run", [(0, 101), (100, 1), (101, 0), ((1 << 64) - 1, 1), (1, (1 << 64) - 1)])
def test_run_outside_the_arena_is_refused(run: tuple[int, int]) -> None:
    """Sums that would wrap in 64 bits included."""
    good = struct.pack("<2Q", 0, 100)
    assert wire.unpack_runs(good, 100) == [(0, 100)]
    with pytest.raises(ProtocolError):
        wire.unpack_runs(good + struct.pack("<2Q", *run), 100)


def test_batches_cover_all_bytes_and_keep_their_bounds() -> None:
    """Requests small enough for slow networks, whatever the caller's runs are like."""
    runs = [Run(0, 0, 0), Run(7, 150 * MIB, 3), *(Run(MIB * i, 11, 13 * i) for i in range(5000))]
    made = list(wire.batches(runs))
    assert all(0 < len(batch) <= wire.MAX_COUNT for batch in made)
    assert all(0 < sum(run.length for run in batch) <= wire.BATCH_BYTES for batch in made)
    flat = [run for batch in made for run in batch]
    assert sum(run.length for run in flat) == sum(run.length for run in runs)
    assert flat[:3] == [Run(7, 64 * MIB, 3), Run(7 + 64 * MIB, 64 * MIB, 3 + 64 * MIB), Run(7 + 128 * MIB, 22 * MIB, 3 + 128 * MIB)]
    assert list(wire.batches([Run(5, 0, 0)])) == []
