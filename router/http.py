"""What HTTP needs and Starlette lacks: bounded bodies, work that stops when the caller hangs up, server-sent events."""

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Send

from router.api.errors import body_too_large, body_too_slow
from router.api.shapes import encoded

T = TypeVar("T")

_SSE_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}
_REQUEST_ID = re.compile(r"^[\x21-\x7e]{1,128}$")


class HungUpError(Exception):
    """The caller went away before its answer was complete. Handled where the request is served; never leaves the router."""


def request_id_of(request: Request) -> str:
    """The caller's `x-request-id` when it is 1..128 printable ASCII characters, else a fresh one."""
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.match(given) else f"req-{uuid.uuid4().hex}"


async def read_body(request: Request, limit: int, limit_s: float) -> bytes:
    """The whole body, at most `limit` bytes, within `limit_s`; raises the 413 or 408 error, or `HungUpError`."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise body_too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise body_too_large(limit)
    except ClientDisconnect:
        raise HungUpError from None
    except TimeoutError:
        raise body_too_slow(limit_s) from None
    return bytes(body)


def bounded(send: Send, limit_s: float) -> Send:
    """`send`, but a caller that takes nothing for `limit_s` counts as gone (`HungUpError`)."""

    async def send_in_time(message: Message) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await send(message)
        except TimeoutError:
            raise HungUpError from None

    return send_in_time


async def until_hang_up(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, whose request has been read to its end; a caller that disconnects cancels it (`HungUpError`).

    Returns only once `work` has let go of everything.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HungUpError
        return task.result()
    finally:
        for future in (task, watcher):
            future.cancel()
        await asyncio.wait({task, watcher})
        if not task.cancelled():
            task.exception()  # seen: after a hang-up nobody wants to hear it


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """Server-sent events on one response; every event is one JSON value."""

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self._send = send
        self._headers = {**_SSE_HEADERS, **headers}
        self.started = False
        """Whether status 200 was sent: from then on an error can only be an event."""

    async def start(self) -> None:
        """Send status 200, unless that was done."""
        if not self.started:
            headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self.started = True

    @contextlib.asynccontextmanager
    async def kept_alive(self, every_s: float) -> AsyncIterator[None]:
        """While the block waits, start the response and send a comment every `every_s`; nothing else may be sent meanwhile."""
        beats: list[asyncio.Task[None]] = []
        later = asyncio.get_running_loop().call_later(every_s, lambda: beats.append(asyncio.ensure_future(self._beat(every_s))))
        try:
            yield
        finally:
            later.cancel()
            for beat in beats:
                beat.cancel()
                await asyncio.wait({beat})
                if not beat.cancelled():
                    beat.exception()  # seen: whoever writes next finds out for itself

    async def write(self, event: bytes) -> None:
        """Send one event, spelled; waits while the caller reads too slowly."""
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def done(self) -> None:
        """Send OpenAI's end mark and end the response."""
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def fail(self, value: Mapping[str, Any]) -> None:
        """Send an error event and end the response, without the end mark: the answer is not complete."""
        await self._send({"type": "http.response.body", "body": encoded(value), "more_body": False})

    async def _beat(self, every_s: float) -> None:
        while True:
            await self.start()
            await self.write(b": keep-alive\n\n")
            await asyncio.sleep(every_s)
