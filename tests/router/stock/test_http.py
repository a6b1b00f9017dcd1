"""HTTP to an engine, against servers that answer byte for byte what a test says."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvpool.errors import AccessError, ConfigError, DeadlineError, KvpoolError, LimitError, ProtocolError, UnavailableError
from router.stock import http
from router.stock.http import Exchange, ask, authorization
from router.stock.place import EnginePlace


@contextlib.asynccontextmanager
async def server(*pieces: bytes, hang: bool = False) -> AsyncIterator[tuple[EnginePlace, list[bytes]]]:
    """Reads a head, writes the pieces one by one, and closes, or with `hang` doesn't."""
    heard: list[bytes] = []
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            heard.append(await reader.readuntil(b"\r\n\r\n"))
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if hang:
                await closed.wait()
        writer.close()

    running = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield EnginePlace(host="127.0.0.1", port=running.sockets[0].getsockname()[1]), heard
    finally:
        closed.set()
        running.close()
        await running.wait_closed()


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_body_comes_in_pieces_and_lines() -> None:
    """However the bytes are cut on their way."""
    whole = CHUNKED + b"8\r\ndata: a\n\r\n7\r\n\ndata: \r\n4\r\nb\r\nc\r\n0\r\n\r\n"
    async with server(*(whole[i : i + 1] for i in range(len(whole)))) as (place, heard):
        exchange = await Exchange.begin(place, "/x", timeout_s=20, headers={"a": "b"})
        assert exchange.status == 200
        assert [line async for line in exchange.lines()] == [b"data: a", b"", b"data: b", b"c"]
        exchange.close()
    assert heard[0].startswith(b"GET /x HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"\r\na: b\r\n" in heard[0]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, ConfigError),
        (422, ConfigError),
        (401, AccessError),
        (403, AccessError),
        (404, UnavailableError),
        (429, LimitError),
        (503, UnavailableError),
    ],
)
async def test_status_is_the_error_it_stands_for(status: int, kind: type[KvpoolError]) -> None:
    """With what the engine says about it."""
    async with server(b"HTTP/1.1 %d Oh\r\ncontent-length: 5\r\n\r\nno-no" % status) as (place, _):
        with pytest.raises(kind, match=f"{status}: no-no"):
            await ask(place, "/x", timeout_s=20)


@pytest.mark.parametrize("pieces", [(), (CHUNKED,), (CHUNKED, b"8\r\nhalf"), (b"HTTP/1.1 200 OK\r\nconte",)])
async def test_connection_that_ends_early_is_an_engine_that_went_away(pieces: tuple[bytes, ...]) -> None:
    """Wherever it breaks."""
    async with server(*pieces) as (place, _):
        with pytest.raises(UnavailableError):
            await ask(place, "/x", timeout_s=20)


async def test_what_is_not_http_is_an_error() -> None:
    """Another service at that port."""
    async with server(b"220 mail.example ESMTP\r\n") as (place, _):
        with pytest.raises(ProtocolError, match="HTTP"):
            await ask(place, "/x", timeout_s=20)


async def test_headers_and_answers_without_end_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded, whoever is there."""
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 1000)
    async with server(b"HTTP/1.1 200 OK\r\n", *[b"x: " + b"y" * 50_000 + b"\r\n"] * 5, hang=True) as (place, _):
        with pytest.raises(ProtocolError, match="without end"):
            await ask(place, "/x", timeout_s=20)
    async with server(CHUNKED, *[b"400\r\n" + b"y" * 1024 + b"\r\n"] * 3, hang=True) as (place, _):
        with pytest.raises(ProtocolError, match="1000 bytes"):
            await ask(place, "/x", timeout_s=20)
    async with server(CHUNKED, *[b"400\r\n" + b"y" * 1024 + b"\r\n"] * 3, hang=True) as (place, _):
        exchange = await Exchange.begin(place, "/x", timeout_s=20)
        with pytest.raises(ProtocolError, match="line"):
            await anext(exchange.lines())
        exchange.close()


async def test_silence_ends_at_the_deadline() -> None:
    """Every wait has one."""
    async with server(CHUNKED, hang=True) as (place, _):
        with pytest.raises(DeadlineError):
            await ask(place, "/x", timeout_s=0.05)


async def test_nobody_at_the_address_is_said_at_once() -> None:
    """A refused connection."""
    async with server() as (place, _):
        pass
    with pytest.raises(UnavailableError, match="can't be reached"):
        await ask(place, "/x", timeout_s=20)


def test_key_is_shown_as_the_file_holds_it_now(tmp_path: Path) -> None:
    """It may be changed while the router runs; what is no key never reaches a header."""
    place = EnginePlace(host="e", port=1, key=tmp_path / "key")
    with pytest.raises(ConfigError, match="can't be read"):
        authorization(place)
    (tmp_path / "key").write_text("first\n")
    assert authorization(place) == {"authorization": "Bearer first"}
    (tmp_path / "key").write_text("a\r\nb: c")
    with pytest.raises(ConfigError, match="printable"):
        authorization(place)
