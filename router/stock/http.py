"""HTTP/1.1 to one stock engine: a request, and the answer piece by piece. A connection serves one request and is closed with it.

To close it early is how an engine is told that nobody wants the answer any more. Every wait ends at the request's deadline.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Final, Self

import httptools

from kvpool.errors import AccessError, ConfigError, DeadlineError, KvpoolError, LimitError, ProtocolError, UnavailableError
from router.stock.place import EnginePlace

CONNECT_S: Final = 5.0
MAX_ANSWER_BYTES: Final = 16 << 20
"""Of an answer that is read whole, and of one line: the first of a stream repeats the prompt."""
_MAX_HEAD_BYTES: Final = 64 << 10
_READ: Final = 1 << 16
_TOLD: Final = 500


class Exchange:
    """One request and its answer: `await Exchange.begin(...)`, read, `close()`. Raises a `RemoteError`."""

    def __init__(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deadline: float) -> None:
        self._address = address
        self._reader, self._writer = reader, writer
        self._deadline = deadline
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._headed = self._over = False
        self._head_bytes = 0

    @classmethod
    async def begin(
        cls,
        place: EnginePlace,
        path: str,
        *,
        timeout_s: float,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        context: ssl.SSLContext | None = None,
    ) -> Self:
        """GET `path`, or POST the JSON `body` to it; returns when the answer's status is known."""
        deadline = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(min(CONNECT_S, timeout_s)):
                reader, writer = await asyncio.open_connection(place.host, place.port, ssl=context)
        except (OSError, TimeoutError) as error:
            raise UnavailableError(f"{place.address} can't be reached: {error or 'no connection in time'}") from error
        one = cls(place.address, reader, writer, deadline)
        try:
            await one._send(_head(place, path, body, headers or {}) + (body or b""))
            while not one._headed:
                await one._feed()
        except BaseException:
            one.close()
            raise
        return one

    @property
    def status(self) -> int:
        """The HTTP status."""
        return int(self._parser.get_status_code())

    async def read(self) -> bytes:
        """What came next of the body; b"" at its end."""
        while not self._pieces and not self._over:
            await self._feed()
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    async def whole(self) -> bytes:
        """All of the body."""
        found = bytearray()
        while piece := await self.read():
            found += piece
            if len(found) > MAX_ANSWER_BYTES:
                raise ProtocolError(f"{self._address}: an answer of more than {MAX_ANSWER_BYTES} bytes")
        return bytes(found)

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """The body's lines as they are complete, without their ends."""
        rest = b""
        while piece := await self.read():
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                yield line.rstrip(b"\r")
            if len(rest) > MAX_ANSWER_BYTES:
                raise ProtocolError(f"{self._address}: a line of more than {MAX_ANSWER_BYTES} bytes")
        if rest:
            yield rest

    async def refused(self) -> KvpoolError:
        """What an answer with an error status says, as the error it stands for: `ConfigError` if the request is at fault."""
        said = (await self.whole())[:_TOLD].decode(errors="replace")
        kinds: dict[int, type[KvpoolError]] = {400: ConfigError, 413: ConfigError, 422: ConfigError, 429: LimitError}
        kinds |= {401: AccessError, 403: AccessError}
        return kinds.get(self.status, UnavailableError)(f"{self._address} answered {self.status}: {said}")

    def close(self) -> None:
        """Be done with it, at once."""
        self._writer.transport.abort()

    def on_headers_complete(self) -> None:
        """For the parser."""
        self._headed = True

    def on_body(self, piece: bytes) -> None:
        """For the parser."""
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """For the parser."""
        self._over = True

    async def _send(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                self._writer.write(data)
                await self._writer.drain()
        except TimeoutError as error:
            raise DeadlineError(f"{self._address} did not take the request in time") from error
        except OSError as error:
            raise self._lost(error) from error

    async def _feed(self) -> None:
        """Read some, and have it parsed."""
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                data = await self._reader.read(_READ)
        except TimeoutError as error:
            raise DeadlineError(f"{self._address} did not answer in time") from error
        except OSError as error:
            raise self._lost(error) from error
        self._head_bytes += 0 if self._headed else len(data)
        if self._head_bytes > _MAX_HEAD_BYTES + _READ:
            raise ProtocolError(f"{self._address} sends headers without end")
        if not data:
            raise self._lost("it closed the connection")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ProtocolError(f"{self._address} doesn't speak HTTP: {error}") from error

    def _lost(self, why: object) -> UnavailableError:
        return UnavailableError(f"{self._address} went away: {why}")


async def ask(place: EnginePlace, path: str, *, timeout_s: float, context: ssl.SSLContext | None = None) -> bytes:
    """GET `path`: the whole answer. Raises what the status stands for."""
    exchange = await Exchange.begin(place, path, timeout_s=timeout_s, headers=authorization(place), context=context)
    try:
        if exchange.status != 200:
            raise await exchange.refused()
        return await exchange.whole()
    finally:
        exchange.close()


def authorization(place: EnginePlace) -> dict[str, str]:
    """The header that shows the engine its API key, as the file holds it now. Raises `ConfigError`."""
    if place.key is None:
        return {}
    try:
        key = place.key.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key of engine {place.address} can't be read: {error}") from error
    if not key.isascii() or not key.isprintable() or not key:
        raise ConfigError(f"the key of engine {place.address} is no line of printable ASCII")
    return {"authorization": f"Bearer {key}"}


def _head(place: EnginePlace, path: str, body: bytes | None, headers: Mapping[str, str]) -> bytes:
    lines = {"host": place.address, "connection": "close", **headers}
    if body is not None:
        lines |= {"content-type": "application/json", "content-length": str(len(body))}
    first = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1"
    return "\r\n".join([first, *(f"{name}: {value}" for name, value in lines.items()), "", ""]).encode()
