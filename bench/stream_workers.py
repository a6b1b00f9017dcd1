"""Stub workers of `bench.router_streams`, in a process of their own: the real worker protocol, no model, a note of each token's time.

A request's prompt names its stream: (`MARK`, number // 100, number % 100), each offset by `MARK`. The first token comes at once, the
others every `gap_s`, in a phase that depends on the stream, so that a thousand of them are spread evenly.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from kvpool.cluster import open_membership
from kvpool.request import (
    DecodeEvent,
    DecodeRequest,
    Finished,
    FinishReason,
    FirstToken,
    PrefillEvent,
    PrefillRequest,
    Published,
    StageTimes,
    Started,
    TokenOut,
    TokenSources,
    WorkerStatus,
)
from kvpool.wire.channel import bind, make_server
from kvpool.wire.worker_server import add_worker
from router.testing.workers import status_of

MARK = 70
"""Ids from here on are plain letters in the tiny model's vocabulary."""
_GOLDEN = 0.618_034


def prompt_of(stream: int) -> list[int]:
    """The prompt of stream 0..9999."""
    return [MARK, MARK + stream // 100, MARK + stream % 100]


def stream_of(prompt: tuple[int, ...]) -> int:
    """Its number again."""
    return (prompt[1] - MARK) * 100 + prompt[2] - MARK


class Stub:
    """A worker that says `token` for ever."""

    def __init__(self, token: int, gap_s: float) -> None:
        self._token = token
        self._gap_s = gap_s
        self.open = 0
        self.sent: defaultdict[int, list[int]] = defaultdict(list)
        """Monotonic nanoseconds of each token by stream; 0 for one that the prefill gave."""

    async def prefill(self, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        """See `WorkerHandler`."""
        yield FirstToken(token=self._token, sources=TokenSources(computed=len(request.prompt)), times=StageTimes())
        yield Published(tokens=len(request.prompt), blocks_written=0)

    async def decode(self, request: DecodeRequest) -> AsyncIterator[DecodeEvent]:
        """See `WorkerHandler`."""
        self.open += 1
        try:
            yield Started(sources=TokenSources(pool=len(request.prompt)), times=StageTimes())
            stream = stream_of(request.prompt)
            sent = self.sent[stream]
            sent.extend([0] * (len(request.generated) - len(sent)))
            due_s = time.monotonic() + (stream * _GOLDEN) % 1 * self._gap_s
            for _ in range(request.max_tokens - len(request.generated)):
                await asyncio.sleep(due_s - time.monotonic())
                due_s += self._gap_s
                sent.append(time.monotonic_ns())
                yield TokenOut(token=self._token)
            yield Finished(reason=FinishReason.LENGTH)
        finally:
            self.open -= 1

    async def status(self) -> WorkerStatus:
        """See `WorkerHandler`."""
        return status_of(self.open)


def serve(pipe: Connection, cluster: str, model: str, prefills: int, decodes: int, token: int, gap_s: float) -> None:
    """Join the cluster and answer commands on `pipe` until "end": "open" (calls), "take" (times by stream, then forgotten)."""
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve(pipe, cluster, model, prefills, decodes, Stub(token, gap_s)))


async def _serve(pipe: Connection, cluster: str, model: str, prefills: int, decodes: int, stub: Stub) -> None:
    servers = []
    info = {"model": model, "namespace": "ab" * 32, "block_tokens": "16", "max_tokens": "4096"}
    with open_membership(cluster) as membership:
        for role in ["prefill"] * prefills + ["decode"] * decodes:
            server = make_server()
            add_worker(server, stub)
            address = bind(server, "127.0.0.1:0")
            await server.start()
            servers.append(server)
            await asyncio.to_thread(membership.join, role=role, address=address, info=info)
        pipe.send("joined")
        await answer(pipe, {"open": lambda: stub.open, "take": lambda: _take(stub)})
        await asyncio.gather(*(server.stop(grace=None) for server in servers))


def _take(stub: Stub) -> dict[int, list[int]]:
    sent, stub.sent = dict(stub.sent), defaultdict(list)
    return sent


async def answer(pipe: Connection, commands: dict[str, Any]) -> None:
    """Answer what comes on `pipe` until "end": a command is a name or (name, arguments...); coroutine functions are awaited."""
    while True:
        name, *arguments = await asyncio.to_thread(pipe.recv)
        if name == "end":
            return
        result = commands[name](*arguments)
        await asyncio.to_thread(pipe.send, await result if asyncio.iscoroutine(result) else result)
