"""TLS in front of a server that has none: a forwarder that ends it, in a thread of its own.

A port also takes connections without TLS and counts them, because the servers behind talk with each other through it: Sentinel and
Redis Cluster have one address for a server, the one that they tell the clients too.
"""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections import Counter
from pathlib import Path

_TLS_RECORD = b"\x16"
_CHUNK = 65536
_LIMIT_S = 10.0


class TlsFront:
    """Use `front_of`. With `ca`, clients that speak TLS must show a certificate that it signed."""

    def __init__(self, cert: Path, key: Path, ca: Path | None = None) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(cert, key)
        if ca is not None:
            self._context.load_verify_locations(ca)
            self._context.verify_mode = ssl.CERT_REQUIRED
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvpool-test-tls", daemon=True)
        self._thread.start()
        self._fronts: dict[int, socket.socket] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.secure: Counter[int] = Counter()
        """Connections with TLS, by the port behind."""
        self.plain: Counter[int] = Counter()
        """Connections without."""

    def front_of(self, port: int) -> int:
        """The port in front of `port`, the same at each call."""
        if port not in self._fronts:
            listener = self._fronts[port] = socket.create_server(("127.0.0.1", 0), backlog=64)
            listener.setblocking(False)
            asyncio.run_coroutine_threadsafe(self._spawn(listener, port), self._loop).result(_LIMIT_S)
        return int(self._fronts[port].getsockname()[1])

    def close(self) -> None:
        """End all connections."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LIMIT_S)
        self._loop.close()
        for listener in self._fronts.values():
            listener.close()

    async def _spawn(self, listener: socket.socket, port: int) -> None:
        self._keep(asyncio.create_task(self._accept(listener, port)))

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the next turn

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket, port: int) -> None:
        while True:
            connection, _ = await self._loop.sock_accept(listener)
            self._keep(asyncio.create_task(self._serve(connection, port)))

    async def _serve(self, connection: socket.socket, port: int) -> None:
        with contextlib.suppress(OSError, ssl.SSLError):
            first = await self._peek(connection)
            secure = first == _TLS_RECORD
            reader = asyncio.StreamReader()
            transport, protocol = await self._loop.connect_accepted_socket(
                lambda: asyncio.StreamReaderProtocol(reader), connection, ssl=self._context if secure else None
            )
            writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
            (self.secure if secure else self.plain)[port] += 1
            try:
                behind, ahead = await asyncio.open_connection("127.0.0.1", port)
                try:
                    pumps = [asyncio.create_task(_pump(*pair)) for pair in ((reader, ahead), (behind, writer))]
                    try:
                        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for pump in pumps:
                            pump.cancel()
                        await asyncio.gather(*pumps, return_exceptions=True)
                finally:
                    ahead.transport.abort()
            finally:
                transport.abort()

    async def _peek(self, connection: socket.socket) -> bytes:
        ready = asyncio.Event()
        self._loop.add_reader(connection, ready.set)
        try:
            await ready.wait()
        finally:
            self._loop.remove_reader(connection)
        return connection.recv(1, socket.MSG_PEEK)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK):
        writer.write(chunk)
        await writer.drain()
