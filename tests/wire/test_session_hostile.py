"""Hostile and malformed packets on a session's socket: that session ends with a clear line in the log, and nothing else suffers."""

import asyncio
import logging
import os
import random
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvpool.errors import ProtocolError
from kvpool.request.pool import Slab
from kvpool.wire.session import MAX_BLOCKS, MAX_MESSAGE, Greeting, Kind, Request, decode_request, encode_greeting, encode_request
from tests.wire.session_rig import DEADLINE_S, NODE, Rig, block, open_descriptors


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def head(
    kind: int, *, flags: int = 0, count: int = 0, name: int = 0, core: int = 0, lease: int = 0, seq: int = 0, nbytes: int = 0
) -> bytes:
    """A request's head, whatever it says."""
    return struct.pack("<BBHHHQQQ", kind, flags, count, name, core, lease, seq, nbytes)


def one(**change: int | bytes) -> bytes:
    """A block as it goes over the wire, with any field changed."""
    said = {
        "key": b"k" * 32, "parent": b"p" * 32, "depth": 16, "length": 64, "ttl": 0, "priority_ms": 0,
        "priority": 50, "has": 1, "zeros": b"", **change,
    }  # fmt: skip
    return struct.pack("<32s32sQQQQBB6s", *said.values())


GOOD = encode_request(Request(Kind.RESERVE, tenant="acme", blocks=[block(1), block(2)]))
KEY = bytes(32)
FULL = (1 << 64) - 1

REQUESTS = {
    "one byte": b"\x02",
    "half a head": GOOD[:31],
    "one byte short": GOOD[:-1],
    "one byte long": GOOD + b"\0",
    "no blocks of two": GOOD[:36],
    "kind 0": head(0),
    "a greeting's kind": head(1),
    "kind 7": head(7),
    "kind 255": head(255, count=1) + KEY,
    "a flag that SLAB lacks": head(Kind.SLAB, flags=1, nbytes=64),
    "a flag nobody has": head(Kind.RESERVE, flags=2, count=1) + one(),
    "SLAB with a lease": head(Kind.SLAB, lease=1, nbytes=64),
    "SLAB with blocks": head(Kind.SLAB, count=1, nbytes=64) + one(),
    "SLAB with a body": head(Kind.SLAB, nbytes=64) + bytes(8),
    "SLAB beyond all bounds": head(Kind.SLAB, nbytes=FULL),
    "PUT with a sequence beyond all bounds": head(Kind.PUT, lease=1, seq=1 << 63, count=1) + one(),
    "PUT with keys instead": head(Kind.PUT, lease=1, count=2) + KEY * 2,
    "COMMIT with blocks instead": head(Kind.COMMIT, lease=1, count=2) + one() * 2,
    "COMMIT with a tenant": head(Kind.COMMIT, lease=1, name=3) + b"abc",
    "COMMIT with a sequence": head(Kind.COMMIT, lease=1, seq=3),
    "RELEASE with bytes": head(Kind.RELEASE, lease=1, nbytes=3),
    "RESERVE with a lease": head(Kind.RELEASE + 10, lease=1),
    "1025 blocks": head(Kind.RESERVE, count=MAX_BLOCKS + 1) + one() * (MAX_BLOCKS + 1),
    "65535 keys, none there": head(Kind.COMMIT, lease=1, count=65535),
    "a name longer than what follows": head(Kind.RESERVE, name=60000),
    "a name of 1025 bytes": head(Kind.RESERVE, name=1025) + b"a" * 1025,
    "a name that is not UTF-8": head(Kind.RESERVE, name=2) + b"\xff\xfe",
    "a length beyond all bounds": head(Kind.RESERVE, count=1) + one(length=FULL),
    "a depth beyond all bounds": head(Kind.RESERVE, count=1) + one(depth=1 << 63),
    "a ttl beyond all bounds": head(Kind.RESERVE, count=1) + one(ttl=1 << 43),
    "a priority's time beyond all bounds": head(Kind.RESERVE, count=1) + one(priority_ms=FULL),
    "has two parents": head(Kind.RESERVE, count=1) + one(has=2),
    "a parent it doesn't have": head(Kind.RESERVE, count=1) + one(has=0),
    "a block's zeros that aren't": head(Kind.RESERVE, count=1) + one(zeros=b"\0\0\0\0\0\1"),
    "a packet longer than any": bytes(MAX_MESSAGE + 1),
    "text": b"GET / HTTP/1.1\r\nHost: node\r\n\r\n" + bytes(40),
}


async def over(rig: Rig, sock: socket.socket) -> None:
    """The node ended this session, and serves others."""
    while True:
        try:
            data = await asyncio.to_thread(sock.recv, 1 << 17)
        except ConnectionResetError:
            break
        if not data:
            break
    sock.close()
    good = await rig.session()
    assert await asyncio.to_thread(good.slab, 64) == Slab(5, 640, 64)
    good.close()
    await rig.until(lambda: len(rig.server) == 0)


@pytest.mark.parametrize("name", REQUESTS)
async def test_request_that_cannot_be_ends_its_session(rig: Rig, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of it reaches the host; the log says which process said what; others are served on."""
    sock = await rig.greeted()
    with caplog.at_level(logging.WARNING, "kvpool"):
        sock.send(REQUESTS[name])
        await over(rig, sock)
    assert [record.message.startswith(f"the session of process {os.getpid()} is over: ") for record in caplog.records] == [True]
    assert rig.host.calls[0].asked == []
    assert rig.host.calls[0].ended == [False]


async def test_empty_packet_ends_its_session(rig: Rig) -> None:
    """It looks like the socket's end and isn't: the process may still be at work, so it must not count as gone."""
    sock = await rig.greeted()
    sock.send(b"")
    sock.send(GOOD)
    await over(rig, sock)
    assert rig.host.calls[0].ended == [False]


async def test_random_bytes_never_hurt(rig: Rig) -> None:
    """Whatever comes, the decoder says `ProtocolError` or reads what a good client could have said."""
    draw = random.Random(5)
    for _ in range(4000):
        data = bytearray(draw.choice((GOOD, encode_request(Request(Kind.COMMIT, 3, keys=[KEY, KEY])), head(Kind.SLAB, nbytes=64))))
        for _ in range(draw.randrange(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        data = data[: draw.randrange(len(data) + 1)] if draw.random() < 0.2 else data
        try:
            request = decode_request(bytes(data))
        except ProtocolError:
            continue
        assert encode_request(request) == bytes(data)
    for _ in range(30):
        sock = await rig.greeted()
        sock.send(draw.randbytes(draw.randrange(1, 400)))
        await over(rig, sock)


def _greeting() -> bytes:
    return encode_greeting(Greeting(NODE, "raw"))


GREETINGS = {
    "no descriptor": (_greeting(), 0),
    "two descriptors": (_greeting(), 2),
    "more descriptors than are looked at": (_greeting(), 40),
    "an empty one": (b"", 1),
    "random bytes": (random.Random(1).randbytes(64), 1),
    "half a greeting": (_greeting()[:20], 1),
    "one byte long": (_greeting() + b"x", 1),
    "another version": (_greeting()[:8] + b"\x03\0" + _greeting()[10:], 1),
    "one that refuses": (_greeting()[:10] + b"\x01\0" + _greeting()[12:], 1),
    "another node": (encode_greeting(Greeting(NODE._replace(node_id="e" * 32))), 1),
    "another life": (encode_greeting(Greeting(NODE._replace(incarnation=2))), 1),
    "a name longer than what follows": (_greeting()[:12] + b"\xff\xff\0\0" + _greeting()[16:], 1),
    "too long": (_greeting() + bytes(MAX_MESSAGE), 1),
    "a request instead": (GOOD, 0),
}


@pytest.mark.parametrize("name", GREETINGS)
async def test_greeting_that_cannot_be_is_refused_and_no_descriptor_leaks(rig: Rig, name: str) -> None:
    """Descriptors that strangers pass are closed, whatever else is wrong."""
    data, count = GREETINGS[name]
    before = open_descriptors()
    sock = await rig.raw()
    passed = [os.memfd_create(f"stray-{i}") for i in range(count)]
    socket.send_fds(sock, [data], passed)
    for descriptor in passed:
        os.close(descriptor)
    await over(rig, sock)
    assert [one for one in open_descriptors() - before if "stray" in one] == []
    assert len(rig.host.calls) == 1  # the good one that `over` made


async def test_refusal_of_a_version_is_read_by_its_client(rig: Rig) -> None:
    """The layout of the greeting outlives versions, so a newer client learns what is wrong."""
    sock = await rig.raw()
    socket.send_fds(sock, [_greeting()[:8] + b"\x03\0" + _greeting()[10:]], [rig.cell_fd])
    answer = await asyncio.to_thread(sock.recv, 4096)
    assert answer[:12] == b"KVPSESS\0\x02\0\x01\0"
    assert b"version 3 of sessions is spoken there, 2 here: run the same version on both sides" in answer
    sock.close()


async def test_descriptors_with_a_later_packet_are_not_taken(rig: Rig) -> None:
    """Only a greeting brings one; the kernel closes the others."""
    sock = await rig.greeted()
    before = open_descriptors()
    stray = os.memfd_create("stray")
    socket.send_fds(sock, [head(Kind.SLAB, nbytes=64)], [stray])
    os.close(stray)
    assert len(await asyncio.to_thread(sock.recv, 4096)) == 32
    assert [one for one in open_descriptors() - before if "stray" in one] == []
    sock.close()
    await rig.until(lambda: rig.host.calls[0].ended == [True])


async def test_client_that_never_reads_is_dropped(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Its answers are not kept for it: once the socket's own buffer is full it goes, and others never waited."""
    sock = await rig.greeted()
    sock.setblocking(False)
    request = head(Kind.COMMIT, lease=1, count=MAX_BLOCKS) + KEY * MAX_BLOCKS

    def flood() -> bool:
        try:
            while True:
                sock.send(request)
        except BlockingIOError:
            return len(rig.server) == 0
        except (BrokenPipeError, ConnectionResetError):
            return True

    await rig.until(flood)
    sock.settimeout(DEADLINE_S)
    await over(rig, sock)
    assert "doesn't read its answers" in caplog.text
    assert rig.host.calls[0].ended == [False]


async def test_host_that_fails_ends_the_session_only(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """A mistake of ours is told in the log and costs one session."""
    sock = await rig.greeted()
    rig.host.calls[0].answers = lambda _: 1 // 0  # type: ignore[assignment, return-value]
    sock.send(head(Kind.SLAB, nbytes=64))
    await over(rig, sock)
    assert "ZeroDivisionError" in caplog.text
    assert rig.host.calls[0].ended == [False]


async def test_many_messages_are_served_without_starving_others(rig: Rig) -> None:
    """Who queues a hundred calls gets a hundred answers in order, and another client's call doesn't wait for all of them."""
    busy, other = await rig.greeted(), await rig.session()

    def queue() -> None:
        for number in range(1, 101):
            busy.send(head(Kind.SLAB, nbytes=64 * number))

    await asyncio.to_thread(queue)
    assert await asyncio.to_thread(other.slab, 64) == Slab(5, 640, 64)
    answers = [await asyncio.to_thread(busy.recv, 4096) for _ in range(100)]
    assert [struct.unpack("<Q", answer[24:32])[0] for answer in answers] == [64 * number for number in range(1, 101)]
    busy.close()
    other.close()
