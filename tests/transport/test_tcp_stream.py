"""Bytes over a socket: looked for before sleeping where that pays, and nothing of it costs a deadline or an idle core."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvpool.errors import DeadlineError, UnavailableError
from kvpool.transport.tcp.stream import NEVER_NS, PlainStream
from kvpool.units import SECOND
from tests.transport.tcp_rig import soon


@contextmanager
def joined() -> Iterator[tuple[PlainStream, socket.socket]]:
    """A stream and who is at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as mine:
        other, _ = listener.accept()
        with other:
            yield PlainStream(mine), other


def word(stream: PlainStream) -> bytes:
    got = bytearray(4)
    assert stream.receive_some([memoryview(got)], 4, soon()) == 4
    return bytes(got)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What each look of any stream brought."""
    seen: list[int] = []
    real = PlainStream._look

    def noted(self: PlainStream, pieces: Any, limit_ns: int) -> int:
        seen.append(real(self, pieces, limit_ns))
        return seen[-1]

    monkeypatch.setattr(PlainStream, "_look", noted)
    return seen


def soon_after_another(stream: PlainStream, other: socket.socket) -> None:
    """Words that lie there already, until the stream takes them for such that come soon."""
    other.sendall(b"word" * 500)
    for _ in range(500):
        word(stream)
        if stream._soon:
            return
    raise AssertionError("no word came soon")


def test_words_that_come_soon_are_looked_for(looks: list[int]) -> None:
    """Whoever looks has them without having slept."""
    with joined() as (stream, other):
        soon_after_another(stream, other)
        looks.clear()
        assert word(stream) == b"word"
        assert looks == [4]


def test_looking_in_vain_is_rare(looks: list[int]) -> None:
    """Once, then not for 4 words, then not for 8, up to 16, however soon the others come."""
    with joined() as (stream, other):
        vain = []
        for number in range(300):
            if stream._soon:
                vain.append(number)
                stream._look = lambda pieces, limit_ns: 0  # type: ignore[method-assign]
            other.sendall(b"word")
            assert word(stream) == b"word"
        gaps = [after - before for before, after in itertools.pairwise(vain)]
        assert gaps
        assert all(gap >= least for gap, least in zip(gaps, (4, 8, 16, 16, 16, 16), strict=False))


def test_more_of_an_answer_is_looked_for_in_vain_twice_at_most(looks: list[int]) -> None:
    """Somebody who sends slowly isn't looked for piece by piece; the next word begins anew."""
    with joined() as (stream, other):
        for _ in range(2):
            other.sendall(b"word")
            word(stream)
            looks.clear()
            for number in range(5):
                sender = threading.Timer(0.02, other.sendall, [bytes([number])])
                sender.start()
                piece = bytearray(1)
                stream.receive([piece], soon())
                assert piece == bytes([number])
                sender.join()
            assert len(looks) <= 5
            assert looks.count(0) <= 2


def test_only_the_stream_that_heard_last_looks(looks: list[int]) -> None:
    """A process with many connections is no process of many that look."""
    with joined() as (first, one), joined() as (second, other):
        soon_after_another(first, one)
        soon_after_another(second, other)
        looks.clear()
        assert word(first) == b"word"
        assert looks == [0]


def test_waiting_for_nobody_costs_nothing() -> None:
    """A look ends, and then the thread sleeps."""
    with joined() as (stream, other):
        soon_after_another(stream, other)
        used: list[int] = []

        def wait() -> None:
            before = time.thread_time_ns()
            with contextlib.suppress(UnavailableError):
                while True:
                    word(stream)
            used.append(time.thread_time_ns() - before)

        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.5)
        other.close()
        waiter.join()
        assert used[0] < SECOND // 10


def test_bytes_that_trickle_end_at_the_deadline() -> None:
    """Although each comes while the next one is looked for."""
    with joined() as (stream, other):
        stop = threading.Event()

        def trickle() -> None:
            with contextlib.suppress(ConnectionError):
                while not stop.is_set():
                    other.send(b"x")

        trickler = threading.Thread(target=trickle)
        trickler.start()
        try:
            with pytest.raises(DeadlineError):
                stream.receive([memoryview(bytearray(1 << 30))], soon(0.2))
        finally:
            stop.set()
            stream.close(reset=True)
            trickler.join()


def test_some_goes_on_through_the_pieces_until_there_is_enough() -> None:
    """Whatever of it comes at once."""
    with joined() as (stream, other):
        pieces = [memoryview(bytearray(size)) for size in (3, 0, 5, 100)]

        def send() -> None:
            for n in range(8):
                other.sendall(bytes([n]))
                time.sleep(0.001)

        sender = threading.Thread(target=send)
        sender.start()
        assert stream.receive_some(pieces, 8, NEVER_NS) == 8
        sender.join()
        assert b"".join(pieces) == bytes(range(8)) + bytes(100)
