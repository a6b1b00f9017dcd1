"""A TCP relay between a client and a server that a test can freeze, cut and mend: a network fault without a network."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Relay:
    """Passes connections on to host:port `target`; `address` is known after `start`."""

    def __init__(self, target: str) -> None:
        self.address = ""
        self.connections = 0
        """Connections taken so far."""
        self._host, _, self._port = target.rpartition(":")
        self._flows = asyncio.Event()
        self._flows.set()
        self._cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def freeze(self) -> None:
        """Nothing passes any more, nothing is refused: the other side hangs, or its packets are dropped."""
        self._flows.clear()

    def cut(self) -> None:
        """Connections break, new ones too: the other side has died."""
        self._cut = True
        for writer in self._writers:
            writer.transport.abort()

    def mend(self) -> None:
        """All is well again; what was frozen arrives late."""
        self._cut = False
        self._flows.set()

    async def stop(self) -> None:
        """Close everything."""
        self.cut()
        if self._server is not None:
            self._server.close()
        while self._tasks:  # a connection taken a moment ago has its task begin only now
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections += 1
        with self._open(writer):
            if self._cut:
                writer.transport.abort()
                return
            await self._flows.wait()
            there, onward = await asyncio.open_connection(self._host, int(self._port))
            with self._open(onward):
                await asyncio.gather(self._pump(reader, onward), self._pump(there, writer))

    @contextmanager
    def _open(self, writer: asyncio.StreamWriter) -> Iterator[None]:
        """Count the connection behind `writer` among those that can be cut; close it at the end."""
        self._writers.add(writer)
        try:
            yield
        except (ConnectionError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()
