"""Worker calls over real gRPC on loopback: values survive, errors keep their class, hang-ups reach the handler."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from kvpool.errors import ConfigError, DeadlineError, LocalError, UnavailableError
from kvpool.request import (
    DecodeEvent,
    DecodeRequest,
    Finished,
    FinishReason,
    FirstToken,
    PrefillEvent,
    PrefillRequest,
    Published,
    Sampling,
    Scope,
    StageTimes,
    Started,
    TokenOut,
    TokenSources,
    WorkerStatus,
)
from kvpool.wire.channel import SERVER_OPTIONS, bind
from kvpool.wire.convert_work import decode_to_pb
from kvpool.wire.worker_client import WorkerClient
from kvpool.wire.worker_server import add_worker

SOURCES = TokenSources(resident=1, pool=2, computed=3)
TIMES = StageTimes(queue_ns=1, load_ns=2, compute_ns=3, sample_ns=2**40)
STATUS = WorkerStatus(
    role="decode",
    model="m",
    active_requests=1,
    queued_requests=2,
    finished_requests=3,
    failed_requests=4,
    prefill_tokens_per_s=5.5,
    resident_tokens=6,
    reaches={"n": "shm"},
)
SCOPE = Scope(salt=b"\0salt\xff", tenant="acme")
PREFILL = PrefillRequest(
    request_id="p",
    prompt=(1, 2, 49151),
    sampling=Sampling(temperature=0.5, top_p=0.9, top_k=3, seed=2**64 - 1),
    scope=SCOPE,
    hand_off=("ab" * 16,),
)
DECODE = DecodeRequest(
    request_id="d",
    prompt=(1, 2),
    generated=(3,),
    max_tokens=9,
    stop_tokens=(2,),
    sampling=Sampling(seed=7),
    scope=SCOPE,
    attention="h2o",
)


class Handler:
    """Answers with fixed events and remembers what it was asked; `d-…` request ids choose how it misbehaves."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.ended = asyncio.Event()

    async def prefill(self, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        self.asked.append(request)
        yield FirstToken(token=4, sources=SOURCES, times=TIMES)
        yield Published(tokens=3, blocks_written=1)

    async def decode(self, request: DecodeRequest) -> AsyncIterator[DecodeEvent]:
        self.asked.append(request)
        if request.request_id == "d-config":
            raise ConfigError("max_tokens is odd; make it even")
        if request.request_id == "d-local":
            raise LocalError("a pass failed")
        try:
            yield Started(sources=SOURCES, times=TIMES)
            if request.request_id == "d-hang":
                await asyncio.Event().wait()
            if request.request_id == "d-cancelled":
                raise asyncio.CancelledError
            yield TokenOut(token=5)
            yield Finished(reason=FinishReason.LENGTH)
        finally:
            self.ended.set()

    async def status(self) -> WorkerStatus:
        return STATUS


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Handler, WorkerClient]]:
    handler, server = Handler(), grpc.aio.server(options=SERVER_OPTIONS)
    add_worker(server, handler)
    client = WorkerClient(bind(server, "127.0.0.1:0"))
    await server.start()
    try:
        yield handler, client
    finally:
        await client.close()
        await server.stop(None)


def decode(request_id: str) -> DecodeRequest:
    return DecodeRequest(request_id=request_id, prompt=(1,), max_tokens=2)


async def test_every_value_survives_the_wire() -> None:
    """What the router says is what the worker hears, and back."""
    async with serving() as (handler, client):
        assert [e async for e in client.prefill(PREFILL, 10)] == [
            FirstToken(token=4, sources=SOURCES, times=TIMES),
            Published(tokens=3, blocks_written=1),
        ]
        assert [e async for e in client.decode(DECODE, 10)] == [
            Started(sources=SOURCES, times=TIMES),
            TokenOut(token=5),
            Finished(reason=FinishReason.LENGTH),
        ]
        assert handler.asked == [PREFILL, DECODE]
        assert await client.status(10) == STATUS


@pytest.mark.parametrize(
    ("request_id", "kind", "words"),
    [
        ("d-config", ConfigError, "make it even"),
        ("d-local", LocalError, "a pass failed"),
        ("d-cancelled", UnavailableError, "gave the request up"),
    ],
)
async def test_errors_keep_their_class_and_words(request_id: str, kind: type[Exception], words: str) -> None:
    """A refusal stays a refusal, and a worker that gives a request up says so instead of leaving the call open."""
    async with serving() as (_, client):
        with pytest.raises(kind, match=words):
            _ = [e async for e in client.decode(decode(request_id), 10)]


async def test_deadline_passes_as_a_deadline_error() -> None:
    """A worker that hangs costs the call's time limit."""
    async with serving() as (handler, client):
        with pytest.raises(DeadlineError):
            _ = [e async for e in client.decode(decode("d-hang"), 0.2)]
        await asyncio.wait_for(handler.ended.wait(), 10)


async def test_closing_the_iterator_ends_the_handler() -> None:
    """A hang-up stops the work."""
    async with serving() as (handler, client):
        events = client.decode(decode("d-hang"), 60)
        assert isinstance(await anext(aiter(events)), Started)
        await events.aclose()  # type: ignore[attr-defined]
        await asyncio.wait_for(handler.ended.wait(), 10)


async def test_nobody_there_is_unavailable() -> None:
    """A dead worker is an error at once, not a wait."""
    client = WorkerClient("127.0.0.1:9")
    with pytest.raises(UnavailableError):
        await client.status(10)
    await client.close()


async def test_a_connection_that_is_closed_meanwhile_is_an_unavailable_worker() -> None:
    """The router drops a worker that left while another request still talks to it: that request goes elsewhere, it doesn't end."""
    async with serving() as (_, client):
        events = client.decode(decode("d-hang"), 60)
        assert isinstance(await anext(aiter(events)), Started)
        await client.close()
        with pytest.raises(UnavailableError):
            await anext(events)
        with pytest.raises(UnavailableError):
            await client.status(10)
        with pytest.raises(UnavailableError):
            _ = [e async for e in client.decode(decode("d"), 10)]


def test_request_with_an_adapter_is_not_sent_to_a_worker() -> None:
    """The message has no place for it: the answer would be the plain model's."""
    with pytest.raises(ConfigError, match="no LoRA adapters"):
        decode_to_pb(DecodeRequest(request_id="r", prompt=(1,), max_tokens=1, adapter="poet"))
