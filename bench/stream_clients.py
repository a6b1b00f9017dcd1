"""The callers of `bench.router_streams`, in a process of their own: as little HTTP as it takes, so that little of the time is theirs."""

import asyncio
import json
import time
from collections import Counter
from multiprocessing.connection import Connection
from typing import cast
from urllib.parse import urlsplit

import uvloop

from bench.stream_workers import answer, prompt_of

_EVENT = b"data: {"
_DONE = b"data: [DONE]"


class Stream(asyncio.Protocol):
    """One streamed completion: when each event came. `done` is set at the end mark, or when the connection is lost."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self._transport: asyncio.Transport | None = None
        self.events: list[int] = []
        self.status = b""
        self.begun = asyncio.Event()
        self.done = asyncio.Event()
        self.complete = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Note the time once for every event whose head is in `data`."""
        now_ns = time.monotonic_ns()
        self.status = self.status or data[9:12]
        data = self._tail + data
        self.events.extend([now_ns] * data.count(_EVENT))
        if _DONE in data:
            self.complete = True
            self.done.set()
        self._tail = _behind(data)
        if self.events or self.status != b"200":
            self.begun.set()

    def connection_lost(self, error: Exception | None) -> None:
        """The router or we hung up."""
        self.begun.set()
        self.done.set()

    def abort(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()


def _behind(data: bytes) -> bytes:
    """The end of `data` that could still become a mark, and holds none."""
    for length in range(min(len(_DONE) - 1, len(data)), 0, -1):
        if _DONE[:-1].startswith(data[-length:]) or _EVENT[:-1].startswith(data[-length:]):
            return data[-length:]
    return b""


class Callers:
    """Callers of one router."""

    def __init__(self, url: str, model: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._model = model
        self._failures: Counter[str] = Counter()

    async def open(self, stream: int, max_tokens: int) -> Stream:
        """Begin a stream."""
        body = {"model": self._model, "prompt": prompt_of(stream), "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        _, protocol = await asyncio.get_running_loop().create_connection(lambda: Stream(head.encode() + content), self._host, self._port)
        return protocol

    async def steady(self, streams: int, max_tokens: int, ramp_s: float) -> dict[int, list[int]]:
        """Many streams at once, begun over `ramp_s` and read to their end: when the events of each came."""
        running: list[Stream] = []
        began_s = time.monotonic()
        for number in range(streams):
            await asyncio.sleep(max(0.0, began_s + ramp_s * number / streams - time.monotonic()))
            running.append(await self.open(number, max_tokens))
        await asyncio.gather(*(stream.done.wait() for stream in running))
        for stream in running:
            stream.abort()
        return {number: stream.events for number, stream in enumerate(running) if stream.complete}

    async def aborted(self, first: int, count: int, at_once: int) -> int:
        """`count` streams, `at_once` at a time, each hung up on: half of them at once, half at their first event; how many had one."""
        left = iter(range(first, first + count))
        began = 0

        async def caller() -> None:
            nonlocal began
            for number in left:
                stream = await self.open(number % 10_000, 1000)
                if number % 2:
                    await stream.begun.wait()
                    began += bool(stream.events)
                    if stream.status not in (b"", b"200"):
                        self._failures[stream.status.decode()] += 1
                stream.abort()
                await stream.done.wait()

        await asyncio.gather(*(caller() for _ in range(at_once)))
        return began

    def failures(self) -> dict[str, int]:
        """Aborted streams that were refused, by status."""
        return dict(self._failures)


def call(pipe: Connection, url: str, model: str) -> None:
    """Answer commands on `pipe` until "end": ("steady", ...) and ("aborted", ...)."""

    async def work() -> None:
        callers = Callers(url, model)
        await answer(pipe, {"steady": callers.steady, "aborted": callers.aborted, "failures": callers.failures})

    uvloop.run(work())
