"""What the machine can do: one thread's memcpy between an arena and private memory, and plain blocking TCP sockets between two processes.

Both move the same number of buffers of the same size as a call of the pool does. The far end of the sockets is `kvpool.cli.bench.far`.
"""

import socket
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvpool.cli.bench.space import Rows
from kvpool.errors import UnavailableError
from kvpool.tier import Arena
from kvpool.tier.arena import DEFAULT_DIRECTORY

REQUEST = struct.Struct("<cIIQ")
"""b"r" or b"w", buffers, bytes of each, offset of the first."""
LIMIT_S = 30.0


class Memcpy:
    """Copies between `arena` (shared memory like a node's, uint8) and rows of private memory, one `memcpy` a row."""

    def __init__(self, arena: Rows) -> None:
        self._arena = arena

    def read(self, rows: Rows, offset: int) -> None:
        """Fill `rows`, uint8 `[buffers, bytes]`, from the arena at `offset` on."""
        size = rows.shape[1]
        for index, row in enumerate(rows):
            start = offset + index * size
            np.copyto(row, self._arena[start : start + size])

    def write(self, rows: Rows, offset: int) -> None:
        """The other way round."""
        size = rows.shape[1]
        for index, row in enumerate(rows):
            start = offset + index * size
            np.copyto(self._arena[start : start + size], row)


class RawTcp:
    """Plain sockets: the far end sends buffers out of its memory, or takes them."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self.pid = pid
        """The far end's process."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self, rows: Rows, offset: int) -> None:
        """As `Memcpy.read`."""
        self._connection.sendall(REQUEST.pack(b"r", *rows.shape, offset))
        for row in rows:
            receive(self._connection, row.data)

    def write(self, rows: Rows, offset: int) -> None:
        """As `Memcpy.write`; returns once the far end has it all."""
        self._connection.sendall(REQUEST.pack(b"w", *rows.shape, offset))
        for row in rows:
            self._connection.sendall(row.data)
        receive(self._connection, memoryview(bytearray(1)))


def receive(connection: socket.socket, view: memoryview) -> None:
    """Fill `view`. Raises `UnavailableError` when the other end is gone."""
    while view:
        got = connection.recv_into(view)
        if not got:
            raise UnavailableError("the other end of the TCP yardstick is gone")
        view = view[got:]


@contextmanager
def memcpy(nbytes: int, directory: Path = DEFAULT_DIRECTORY) -> Iterator[Memcpy]:
    """A `Memcpy` with an arena of its own of `nbytes`, made as a node makes one."""
    with Arena.create(directory, uuid.uuid4().hex, 1, nbytes) as arena:
        arena.data[:] = 1
        yield Memcpy(arena.data)


@contextmanager
def raw_tcp(nbytes: int) -> Iterator[RawTcp]:
    """A connected `RawTcp` whose far end, another process, has `nbytes` of memory."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        command = [sys.executable, "-m", "kvpool.cli.bench.far", str(listener.getsockname()[1]), str(nbytes)]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL) as far:
            try:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(LIMIT_S)
                    yield RawTcp(connection, far.pid)
            except TimeoutError as error:
                raise UnavailableError("the far end of the TCP yardstick doesn't answer") from error
            finally:
                far.kill()
