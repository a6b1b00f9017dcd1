"""What engines of several versions publish is read; what can't be is told apart and never guessed."""

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.feeds.vllm_wire import Batch, BlocksRemoved, BlocksStored, Cleared, MalformedError, Unknown, read_batch
from router.testing.vllm import CLEARED, as_array, names_of, removed, stored
from tests.router.feeds.captured import captured, revived

TOKENS = list(range(100, 148))


def one(event: Any) -> Any:
    (read,) = read_batch(msgspec.msgpack.encode([12.5, [event], 0])).events
    return read


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("spell", [dict, as_array])
def test_arrays_and_maps_numbers_and_bytes_say_the_same(spell: Any, as_bytes: bool) -> None:
    """Versions differ in how they spell an event, and a setting in how they name blocks."""
    event = stored(TOKENS, 16, first=1, as_bytes=as_bytes, extra_keys=[None, None], group_idx=3)
    read = one(spell(event))
    assert isinstance(read, BlocksStored)
    names = [name.to_bytes(8, "big") for name in names_of(TOKENS, 16) if isinstance(name, int)]
    assert (list(read.hashes), read.parent) == (names[1:], names[0])
    assert (read.tokens, read.block_size, read.medium, read.lora, read.group) == (TOKENS[16:], 16, "GPU", "", 3)
    gone = one(spell(removed(names_of(TOKENS, 16, as_bytes=as_bytes), medium="CPU")))
    assert gone == BlocksRemoved(hashes=tuple(names), medium="CPU", group=0)
    assert isinstance(one(spell(CLEARED)), Cleared)


def test_batches_may_be_maps_too() -> None:
    """The newest engines name the batch's fields."""
    batch = read_batch(msgspec.msgpack.encode({"ts": 1.5, "events": [CLEARED], "data_parallel_rank": 1}))
    assert batch.ts == 1.5
    assert isinstance(batch.events[0], Cleared)


def test_fields_that_are_left_out_have_their_defaults() -> None:
    """An engine leaves out what is at its default, an old one what it doesn't know yet."""
    read = one(["BlockStored", [1, 2], None, TOKENS[:32], 16, None])
    assert (read.medium, read.lora, read.extra, read.group, read.kind) == ("GPU", "", (), 0, "")
    assert one({"type": "BlockStored", "block_hashes": [1], "token_ids": TOKENS[:16], "block_size": 16, "lora_id": 7}).lora == "lora_id 7"


GOOD = stored(TOKENS, 16)


@pytest.mark.parametrize(
    "event",
    [
        {**GOOD, "type": "BlockSplit"},
        {**GOOD, "block_hashes": []},
        {**GOOD, "block_hashes": [-1, 2, 3]},
        {**GOOD, "block_hashes": [1 << 63, 1.5, 3]},
        {**GOOD, "block_hashes": [b"short", b"x" * 32, b"y" * 32]},
        {**GOOD, "block_hashes": "abc"},
        {**GOOD, "parent_block_hash": "abc"},
        {**GOOD, "token_ids": TOKENS[:-1]},
        {**GOOD, "token_ids": None},
        {**GOOD, "block_size": 0},
        {**GOOD, "block_size": 1 << 40},
        {**GOOD, "block_size": "16"},
        {**GOOD, "medium": 7},
        {**GOOD, "lora_name": 7},
        {**GOOD, "extra_keys": [None]},
        {**GOOD, "group_idx": "a"},
        {name: value for name, value in GOOD.items() if name != "token_ids"},
        {"type": "BlockRemoved"},
        ["BlockStored"],
        ["AllBlocksCleared", 1],
        ["BlockMoved", [1]],
        [],
        None,
        7,
        {"type": ["BlockStored"]},
        {},
    ],
)
def test_events_of_another_version_are_unknown(event: Any) -> None:
    """One event that isn't understood costs itself, not its batch."""
    events = read_batch(msgspec.msgpack.encode([1.0, [CLEARED, event, CLEARED]])).events
    assert [type(each) for each in events] == [Cleared, Unknown, Cleared]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\xcb",
        b"\x91" * 5000,
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode(["x", []]),
        msgspec.msgpack.encode(7),
    ],
)
def test_payloads_that_are_no_batch_are_malformed(payload: bytes) -> None:
    """Cut, nested without end, or of another shape."""
    with pytest.raises(MalformedError):
        read_batch(payload)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_malformed(payload: bytes) -> None:
    """Whoever can reach the socket can send anything."""
    with suppress(MalformedError):
        assert isinstance(read_batch(payload), Batch)


def test_captured_events_are_all_read() -> None:
    """What real engines published, word for word."""
    kinds: dict[str, int] = {}
    for message in captured():
        payload = msgspec.msgpack.encode(revived(message["decoded"]))
        assert payload.hex().startswith(message["raw_head"]), "encoded as it was on the line"
        for event in read_batch(payload).events:
            kinds[type(event).__name__] = kinds.get(type(event).__name__, 0) + 1
    assert "Unknown" not in kinds
    assert kinds["BlocksStored"] > 100
    assert kinds["BlocksRemoved"] > 20
    assert kinds["Cleared"] == 1
