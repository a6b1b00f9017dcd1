"""A client's end of a connection: an answer is understood wherever the network cuts it, and one that can't be is refused."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from kvpool.errors import AccessError, ProtocolError, UnavailableError
from kvpool.transport.tcp import Peer, TcpReach, Want, wire
from tests.transport.tcp_rig import LIFE, NODE, key, soon

SIZES = (64, 100, 64)


@contextmanager
def answering(*answers: Sequence[bytes]) -> Iterator[TcpReach]:
    """A reach to somebody who gives these answers, each in these parts, whatever the requests are, and then hangs up."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(ConnectionError):  # who has read enough hangs up
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for parts in ([wire.pack_answer(0, 8) + struct.pack("<Q", 4096)], *answers):
                connection.recv(4096)
                for number, part in enumerate(parts):
                    time.sleep(0.001 if number else 0)
                    connection.sendall(part)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        reach = TcpReach(Peer(address=f"127.0.0.1:{listener.getsockname()[1]}", node_id=NODE, incarnation=LIFE))
        try:
            yield reach
        finally:
            reach.close()
            thread.join()


def wants() -> list[Want]:
    """Three, of `SIZES`."""
    return [(key(n), size, np.zeros(16, np.uint8), np.zeros(size - 16, np.uint8)) for n, size in enumerate(SIZES)]


def frame(number: int) -> bytes:
    return bytes(range(number, number + SIZES[number]))


def answer(here: Sequence[int]) -> bytes:
    """These frames, of three."""
    told = bytes(n in here for n in range(3)) if len(here) < 3 else b""
    body = told + b"".join(frame(n) for n in here)
    return wire.pack_answer(len(here), len(body)) + body


@pytest.mark.parametrize("here", [(0, 1, 2), (0, 2), (1,), ()])
def test_answer_cut_anywhere_is_the_same_answer(here: Sequence[int]) -> None:
    """The frames that are there go where they belong, though the bytes that tell which are there come with them or alone."""
    whole = answer(here)
    cuts = range(1, len(whole))
    with answering(*([whole[:cut], whole[cut:]] for cut in cuts)) as reach:
        for _ in cuts:
            asked = wants()
            assert reach.get(asked, soon()) == [n in here for n in range(3)]
            for n in here:
                assert asked[n][2].tobytes() + asked[n][3].tobytes() == frame(n)


@pytest.mark.parametrize(
    "whole",
    [
        wire.pack_answer(3, sum(SIZES) - 1) + bytes(sum(SIZES)), wire.pack_answer(3, sum(SIZES) + 3) + bytes(300),
        wire.pack_answer(4, sum(SIZES)) + bytes(300), wire.pack_answer(2, 3 + 128) + b"\1\0\0" + bytes(300),
        wire.pack_answer(1, 3 + 64) + b"\1\1\0" + bytes(300), wire.pack_answer(0, 3) + b"\0\0\0" + bytes(225),
        wire.pack_answer(2, 0) + b"\1\1\0" + bytes(300),
    ],
)  # fmt: skip
def test_answer_that_contradicts_itself_is_refused(whole: bytes) -> None:
    """Nobody knows then where the next one begins."""
    with answering([whole]) as reach, pytest.raises(ProtocolError):
        reach.get(wants(), soon())


@pytest.mark.parametrize("size", [0, 5, 300, 512])
@pytest.mark.parametrize("cut", [16, 20, 300])
def test_refusal_is_read_to_its_end(size: int, cut: int) -> None:
    """Though it was taken for frames at first."""
    refusal = wire.pack_refusal(wire.Status.STRANGER, "x" * size)
    with answering([refusal[:cut], refusal[cut:]]) as reach, pytest.raises(AccessError, match=f"^x{{{size}}}$"):
        reach.get(wants(), soon())


@pytest.mark.parametrize("cut", [0, 1, 15, 16, 17, 19, 20, 100])
def test_answer_that_ends_early_is_an_error(cut: int) -> None:
    """Whoever answers may die at any byte."""
    with answering([answer((0, 2))[:cut]]) as reach, pytest.raises(UnavailableError):
        reach.get(wants(), soon())
