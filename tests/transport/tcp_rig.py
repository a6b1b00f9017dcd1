"""A TCP server in this process over an array and an index that can be looked at."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvpool.block import BlockKey
from kvpool.transport.reach import Bytes
from kvpool.transport.tcp import MemoryIndex, Peer, Served, TcpReach, TcpServer, wire
from kvpool.units import MIB, SECOND

NODE = "0f" * 16
LIFE = 77
FRAME = 64 * 1024 + 64
EMPTY = np.zeros(0, np.uint8)


class StallingIndex(MemoryIndex):
    """Answers probes only when it may."""

    def __init__(self) -> None:
        super().__init__()
        self._may = threading.Event()
        self.go_on()

    def stall(self) -> None:
        """Not from now on."""
        self._may.clear()

    def go_on(self) -> None:
        """It may again."""
        self._may.set()

    def probe(self, keys: bytes) -> bytes:
        """See `Index.probe`."""
        assert self._may.wait(30)
        return super().probe(keys)


@dataclass
class Rig:
    """What is served: `count` frames of `FRAME` bytes with their number in every byte, by the keys `key(number)`."""

    server: TcpServer
    arena: Bytes
    index: StallingIndex
    opened: list[TcpReach] = field(default_factory=list)

    @property
    def peer(self) -> Peer:
        """Whom to dial."""
        return Peer(address=self.server.address, node_id=NODE, incarnation=LIFE)

    def open(self, **how: Any) -> TcpReach:
        """A client; closed at the end."""
        self.opened.append(TcpReach(replace(self.peer, **how)))
        return self.opened[-1]

    def dial(self, hello: bytes | None = None) -> socket.socket:
        """A connection to be naughty with; by default a client that was let in."""
        host, port = self.server.address.rsplit(":", 1)
        connection = socket.create_connection((host, int(port)), 30)
        connection.sendall(wire.pack_hello(NODE, LIFE, "") if hello is None else hello)
        if hello is None:
            assert len(connection.recv(24, socket.MSG_WAITALL)) == 24
        return connection


@contextmanager
def served(count: int = 4, arena_bytes: int = 16 * MIB, **how: Any) -> Iterator[Rig]:
    """A running rig."""
    arena, index = np.zeros(arena_bytes, np.uint8), StallingIndex()
    for number in range(count):
        index.frames[key(number)] = (number * FRAME, FRAME)
        arena[number * FRAME : (number + 1) * FRAME] = number + 1
    server = TcpServer("127.0.0.1:0", Served(node_id=NODE, incarnation=LIFE, arena=arena, index=index), **how)
    rig = Rig(server, arena, index)
    try:
        yield rig
    finally:
        for reach in rig.opened:
            reach.close()
        server.close()


def key(number: int) -> BlockKey:
    """Of frame `number`."""
    return BlockKey(struct.pack("<Q24x", number + 1))


def soon(within_s: float = 30.0) -> int:
    """A deadline."""
    return time.monotonic_ns() + int(within_s * SECOND)


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"not within 30 s: {what}"
        time.sleep(0.01)


def ended(connection: socket.socket) -> bytes:
    """What the server still said before it hung up; an `AssertionError` if it doesn't hang up."""
    said = b""
    try:
        while chunk := connection.recv(65536):
            said += chunk
    except ConnectionError:
        pass
    except TimeoutError:
        raise AssertionError("the server did not hang up") from None
    finally:
        connection.close()
    return said
