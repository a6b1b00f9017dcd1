"""Wire bytes, pinned: messages encoded by hand (varints and length prefixes, nothing generated) must decode to our values and back.

Field numbers and types are a promise to clients in other languages. Literals are append-only.
"""

from dataclasses import replace

import pytest

from kvpool.errors import ConfigError, ProtocolError
from kvpool.request import (
    DecodeRequest,
    FirstToken,
    Logprobs,
    PrefillRequest,
    Sampling,
    Scope,
    StageTimes,
    TokenOut,
    TokenSources,
)
from kvpool.request.pool import NodeDescription, Outcome, Reservation, ShmOffer, Stored, TcpOffer, UcxOffer
from kvpool.wire import convert, convert_work
from kvpool.wire.gen import access_pb2, peer_pb2, pool_pb2, worker_pb2

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


def double(field: int, eight_bytes: str) -> bytes:
    return varint(field << 3 | 1) + bytes.fromhex(eight_bytes)


def test_reservations_on_the_wire() -> None:
    """key 1, parent 2, depth 3, length 4, ttl_ms 5, priority 6, priority_ms 7; an absent field is zero, an absent priority 50."""
    first = blob(1, KEY) + number(4, 737_472)
    second = blob(1, PARENT) + blob(2, KEY) + number(3, 16) + number(4, 737_472) + number(5, 60_000)
    third = blob(1, KEY) + number(4, 64) + bytes([6 << 3, 0]) + number(7, 9)  # a priority of 0 is said, not left out
    raw = blob(1, b"me") + number(2, 1500) + blob(3, first) + blob(3, second) + blob(3, third) + number(4, 40) + blob(5, b"t")
    message = pool_pb2.ReserveRequest.FromString(raw)
    assert (message.owner, message.lease_ms) == ("me", 1500)
    values = convert.reservations_from_pb(message.blocks)
    assert values == [
        Reservation(KEY, b"", 0, 737_472),
        Reservation(PARENT, KEY, 16, 737_472, 60_000),
        Reservation(KEY, b"", 0, 64, 0, 0, 9),
    ]
    again = pool_pb2.ReserveRequest(owner="me", lease_ms=1500, blocks=convert.reservations_to_pb(values), sequence=40, tenant="t")
    assert again.SerializeToString(deterministic=True) == raw


def test_grants_and_places_on_the_wire() -> None:
    """Outcomes are 0 granted, 1 exists, 2 no space; a miss is an empty message."""
    raw = number(1, 7) + blob(2, number(2, 4096)) + blob(2, number(1, 1)) + blob(2, number(1, 2))
    grants = convert.grants_from_pb(pool_pb2.ReserveResponse.FromString(raw).grants)
    assert grants == [(Outcome.GRANTED, 4096), (Outcome.EXISTS, 0), (Outcome.NO_SPACE, 0)]
    again = pool_pb2.ReserveResponse(lease_id=7, grants=convert.grants_to_pb(grants))
    assert again.SerializeToString(deterministic=True) == raw
    raw = number(1, 9) + blob(2, number(1, 1) + number(2, 64) + number(3, 100)) + blob(2, b"")
    places = convert.places_from_pb(pool_pb2.AcquireResponse.FromString(raw).found)
    assert places == [(64, 100), None]
    assert pool_pb2.AcquireResponse(lease_id=9, found=convert.places_to_pb(places)).SerializeToString(deterministic=True) == raw


def test_acquire_that_fetches_and_asks_for_details_on_the_wire() -> None:
    """fetch_from 5, detail 6 of a request; parent 4 to priority_ms 10 of what was found; a priority of 0 is said, 50 is not."""
    raw = blob(1, b"me") + number(2, 1500) + blob(3, KEY) + number(4, 40) + blob(5, b"n1") + blob(5, b"n2") + number(6, 1)
    message = pool_pb2.AcquireRequest.FromString(raw)
    assert (list(message.fetch_from), message.detail) == (["n1", "n2"], True)
    plain = number(1, 1) + number(2, 64) + number(3, 100)
    full = plain + blob(4, PARENT) + number(5, 16) + number(6, 60_000) + number(7, 40) + blob(8, b"t") + bytes([9 << 3, 0]) + number(10, 9)
    raw = number(1, 9) + blob(2, full) + blob(2, b"") + blob(2, plain)
    blocks = convert.stored_from_pb(pool_pb2.AcquireResponse.FromString(raw).found)
    assert blocks == [Stored(64, 100, PARENT, 16, 60_000, 40, "t", 0, 9), None, Stored(64, 100, b"", 0)]
    assert pool_pb2.AcquireResponse(lease_id=9, found=convert.stored_to_pb(blocks)).SerializeToString(deterministic=True) == raw
    assert convert.places_from_pb(pool_pb2.AcquireResponse.FromString(raw).found) == [(64, 100), None, (64, 100)]


def test_near_reservations_and_peers_on_the_wire() -> None:
    """near 6 of a reserve; node_id 1, incarnation 2 of a hand-over, done 1, left 2 of its answer; keys 1, extent_tokens 2, heads 1."""
    assert pool_pb2.ReserveRequest.FromString(number(6, 1)).near
    asked = peer_pb2.HandoverRequest(node_id="ab", incarnation=7)
    assert asked.SerializeToString(deterministic=True) == blob(1, b"ab") + number(2, 7)
    assert peer_pb2.HandoverResponse(done=True, left=3).SerializeToString(deterministic=True) == number(1, 1) + number(2, 3)
    heads = peer_pb2.HeadsRequest(keys=[b"ab", b"c"], extent_tokens=9)
    assert heads.SerializeToString(deterministic=True) == blob(1, b"ab") + blob(1, b"c") + number(2, 9)
    assert peer_pb2.HeadsResponse(heads=[b"", b"c"]).SerializeToString(deterministic=True) == blob(1, b"") + blob(1, b"c")


def test_descriptions_on_the_wire() -> None:
    """Identity, books, offers."""
    books = b"".join(number(field, field * 10) for field in range(2, 10))
    counters = blob(10, blob(1, b"hits") + number(2, 5))
    shm = blob(11, blob(1, b"/dev/shm/a") + blob(2, b"boot") + blob(3, b"/dev/shm/a.sock"))
    ucx = blob(12, blob(1, b"\x01") + blob(2, b"\x02") + number(3, 2**47) + number(4, 80))
    raw = blob(1, b"ab" * 16) + books + counters + shm + ucx + number(13, 1) + blob(14, blob(1, b"h:1"))
    value = convert.description_from_pb(pool_pb2.DescribeResponse.FromString(raw))
    assert value == NodeDescription(
        node_id="ab" * 16,
        incarnation=20,
        capacity_bytes=30,
        free_bytes=40,
        used_bytes=50,
        pinned_bytes=60,
        blocks=70,
        read_leases=80,
        write_leases=90,
        counters={"hits": 5},
        shm=ShmOffer(path="/dev/shm/a", boot_id="boot", session="/dev/shm/a.sock"),
        ucx=UcxOffer(worker_address=b"\x01", rkey=b"\x02", base_address=2**47, length=80),
        tcp=TcpOffer(address="h:1"),
        grpc_data=True,
    )
    assert convert.description_to_pb(value).SerializeToString(deterministic=True) == raw


def test_prefill_requests_and_events_on_the_wire() -> None:
    """Tokens are packed varints; temperature and top_p are doubles."""
    sampling = double(1, "000000000000e03f") + double(2, "000000000000f03f") + number(3, 40) + number(4, 2**64 - 1)
    raw = blob(1, b"r1") + blob(2, varint(1) + varint(49151)) + blob(3, sampling)
    value = convert_work.prefill_from_pb(worker_pb2.PrefillRequest.FromString(raw))
    assert value == PrefillRequest(
        request_id="r1", prompt=(1, 49151), sampling=Sampling(temperature=0.5, top_p=1.0, top_k=40, seed=2**64 - 1)
    )
    assert convert_work.prefill_to_pb(value).SerializeToString(deterministic=True) == raw
    sources, times = number(1, 1) + number(2, 2) + number(3, 3), number(1, 4) + number(2, 5) + number(3, 6) + number(4, 7)
    raw = blob(1, number(1, 300) + blob(2, sources) + blob(3, times))
    event = convert_work.prefill_event_from_pb(worker_pb2.PrefillEvent.FromString(raw))
    assert event == FirstToken(
        token=300,
        sources=TokenSources(resident=1, pool=2, computed=3),
        times=StageTimes(queue_ns=4, load_ns=5, compute_ns=6, sample_ns=7),
    )
    assert convert_work.prefill_event_to_pb(event).SerializeToString(deterministic=True) == raw


def test_penalties_biases_and_logprobs_on_the_wire() -> None:
    """Fields 5 to 9 of Sampling, 9 only when log-probabilities are wanted (0 is wanted too); lists of unequal length are refused."""
    half, one, zero = "000000000000e03f", "000000000000f03f", "0000000000000000"
    lists = blob(7, varint(300)) + blob(8, bytes.fromhex(half))
    raw = blob(1, b"d") + blob(2, b"\x05") + number(4, 1)
    sampling = double(2, one) + double(5, half) + double(6, one) + lists + b"\x48\x00"
    value = convert_work.decode_from_pb(worker_pb2.DecodeRequest.FromString(raw + blob(6, sampling)))
    assert value.sampling == Sampling(presence_penalty=0.5, frequency_penalty=1.0, logit_bias=((300, 0.5),), logprobs=0)
    assert convert_work.decode_to_pb(value).SerializeToString(deterministic=True) == raw + blob(6, sampling)
    longer = blob(6, double(2, one) + blob(7, varint(300)) + blob(8, bytes.fromhex(half + zero)))
    with pytest.raises(ConfigError, match="2 biases for 1 tokens"):
        convert_work.decode_from_pb(worker_pb2.DecodeRequest.FromString(raw + longer))


def test_logprobs_of_tokens_on_the_wire() -> None:
    """Field 4 of both events: chosen 1, top_tokens 2, top 3; a mismatch is the worker's fault."""
    minus_one, minus_half = bytes.fromhex("000080bf"), bytes.fromhex("000000bf")
    told = b"\x0d" + minus_one + blob(2, varint(300) + b"\x07") + blob(3, minus_half + minus_one)
    logprobs = Logprobs(chosen=-1.0, top=((300, -0.5), (7, -1.0)))
    raw = number(2, 7) + blob(4, told)
    event = convert_work.decode_event_from_pb(worker_pb2.DecodeEvent.FromString(raw))
    assert event == TokenOut(token=7, logprobs=logprobs)
    assert convert_work.decode_event_to_pb(event).SerializeToString(deterministic=True) == raw
    raw = blob(1, number(1, 7) + blob(2, b"") + blob(3, b"") + blob(4, told))
    first = convert_work.prefill_event_from_pb(worker_pb2.PrefillEvent.FromString(raw))
    assert first == FirstToken(token=7, sources=TokenSources(), times=StageTimes(), logprobs=logprobs)
    assert convert_work.prefill_event_to_pb(first).SerializeToString(deterministic=True) == raw
    with pytest.raises(ProtocolError, match="1 log-probabilities for 2 tokens"):
        convert_work.decode_event_from_pb(
            worker_pb2.DecodeEvent.FromString(number(2, 7) + blob(4, blob(2, varint(300) + b"\x07") + blob(3, minus_one)))
        )


def test_decode_requests_on_the_wire() -> None:
    """prompt 2, generated 3, max_tokens 4, stop_tokens 5."""
    sampling = double(2, "000000000000f03f")
    raw = blob(1, b"d") + blob(2, b"\x05\x06") + blob(3, b"\x07") + number(4, 300) + blob(5, b"\x02") + blob(6, sampling)
    value = convert_work.decode_from_pb(worker_pb2.DecodeRequest.FromString(raw))
    assert value == DecodeRequest(request_id="d", prompt=(5, 6), generated=(7,), max_tokens=300, stop_tokens=(2,))
    assert convert_work.decode_to_pb(value).SerializeToString(deterministic=True) == raw


def test_attention_on_the_wire() -> None:
    """Field 7 of a decode request: a text, absent when the worker is to choose; one that is too long is refused."""
    head, sampling = blob(1, b"d") + blob(2, b"\x05") + number(4, 9), blob(6, double(2, "000000000000f03f"))
    raw = head + sampling + blob(7, b"quest:page=8")
    value = convert_work.decode_from_pb(worker_pb2.DecodeRequest.FromString(raw))
    assert value == DecodeRequest(request_id="d", prompt=(5,), max_tokens=9, attention="quest:page=8")
    assert convert_work.decode_to_pb(value).SerializeToString(deterministic=True) == raw
    assert convert_work.decode_to_pb(replace(value, attention="")).SerializeToString(deterministic=True) == head + sampling
    with pytest.raises(ConfigError, match="at most 256 characters"):
        convert_work.decode_from_pb(worker_pb2.DecodeRequest.FromString(head + sampling + blob(7, b"q" * 257)))


def test_hand_off_on_the_wire() -> None:
    """Field 4 of a prefill request: node ids in order; absent when there are none. Three are refused."""
    ids, sampling = ("ab" * 16, "cd" * 16), blob(3, double(2, "000000000000f03f"))
    raw = blob(1, b"r") + blob(2, b"\x05") + sampling + blob(4, ids[0].encode()) + blob(4, ids[1].encode())
    value = convert_work.prefill_from_pb(worker_pb2.PrefillRequest.FromString(raw))
    assert value == PrefillRequest(request_id="r", prompt=(5,), hand_off=ids)
    assert convert_work.prefill_to_pb(value).SerializeToString(deterministic=True) == raw
    nowhere = PrefillRequest(request_id="r", prompt=(5,))
    assert convert_work.prefill_to_pb(nowhere).SerializeToString(deterministic=True) == blob(1, b"r") + blob(2, b"\x05") + sampling
    with pytest.raises(ConfigError, match="at most 2"):
        convert_work.prefill_from_pb(worker_pb2.PrefillRequest.FromString(raw + blob(4, b"ef" * 16)))


def test_scopes_on_the_wire() -> None:
    """Field 10 of both requests: salt 1, tenant 2; absent for everybody."""
    scope = blob(10, blob(1, b"\xaa\xbb") + blob(2, b"acme"))
    sampling = blob(3, double(2, "000000000000f03f"))
    prefill = worker_pb2.PrefillRequest.FromString(blob(1, b"r") + sampling + scope)
    assert convert_work.prefill_from_pb(prefill).scope == Scope(salt=b"\xaa\xbb", tenant="acme")
    value = DecodeRequest(request_id="r", prompt=(1,), max_tokens=1, scope=Scope(salt=b"\xaa\xbb", tenant="acme"))
    assert convert_work.decode_to_pb(value).SerializeToString(deterministic=True).endswith(scope)
    assert not convert_work.decode_to_pb(DecodeRequest(request_id="r", prompt=(1,), max_tokens=1)).HasField("scope")


def test_who_am_i_on_the_wire() -> None:
    """name 1, tenant 2 (absent: bound to none), rights 3, salt 4."""
    raw = blob(1, b"alice") + blob(2, b"acme") + blob(3, b"read") + blob(3, b"write") + blob(4, b"\xaa" * 32)
    message = access_pb2.WhoAmIResponse(name="alice", tenant="acme", rights=["read", "write"], salt=b"\xaa" * 32)
    assert message.SerializeToString(deterministic=True) == raw
    assert not access_pb2.WhoAmIResponse.FromString(blob(1, b"root")).HasField("tenant")
    rates = access_pb2.SetRatesRequest(tenant="acme", requests_per_s=1.0, bytes_per_s=2.0)
    assert rates.SerializeToString(deterministic=True) == blob(1, b"acme") + double(2, "000000000000f03f") + double(3, "0000000000000040")
