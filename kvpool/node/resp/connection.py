"""One client's connection: commands out of its stream, answers into it, each wait with its deadline and all bytes in hand paid for.

Small answers are gathered and go out together when the commands that came together are done; a large one goes out at once, and the next
one waits until the client has taken it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final, NamedTuple

from kvpool.errors import LimitError, ProtocolError
from kvpool.node.resp.budget import FREE_BYTES, Budget
from kvpool.node.resp.protocol import Limits, Parser, error

_READ_BYTES: Final = 256 << 10
_GATHER_BYTES: Final = 64 << 10
_TURN: Final = 64
"""Commands of one client that are done before others get their turn."""


class Waits(NamedTuple):
    """In seconds: for the handshake of TLS, and from then until it is known who a client is; between commands; until a command that has
    begun is whole; until a client has taken an answer; for bytes that others have in hand."""

    stranger_s: float = 10.0
    idle_s: float = 600.0
    command_s: float = 60.0
    answer_s: float = 60.0
    budget_s: float = 10.0


class Connection:
    """Give `protocol` to the event loop, `open` with the transport it made, then go over `commands`."""

    def __init__(self, budget: Budget, waits: Waits, limits: Limits) -> None:
        self._budget = budget
        self._waits = waits
        self._parser = Parser(limits)
        self._reader = asyncio.StreamReader(limit=_READ_BYTES)
        self.protocol = asyncio.StreamReaderProtocol(self._reader)
        self._writer: asyncio.StreamWriter | None = None
        self._transport: asyncio.Transport | None = None
        self._answers: list[bytes | memoryview] = []
        self._gathered = 0
        self._taken_in = self._taken_out = 0

    async def open(self, transport: asyncio.Transport) -> None:
        """Begin."""
        self._transport = transport
        self._writer = asyncio.StreamWriter(transport, self.protocol, self._reader, asyncio.get_running_loop())

    def limit(self, limits: Limits) -> None:
        """What the next commands may be."""
        self._parser.limits = limits

    async def commands(self, known: Callable[[], bool]) -> AsyncIterator[list[bytes]]:
        """The client's commands, until it ends its stream between two of them. A stream that breaks the protocol, or a command that there
        is no room for, is told why before the end. Raises `TimeoutError`, `EOFError`, `OSError`."""
        loop = asyncio.get_running_loop()
        stranger_until = loop.time() + self._waits.stranger_s
        done, command_until = 0, 0.0
        while True:
            try:
                words = self._parser.next()
                if words is None:
                    await self._pay_in(self._parser.announced)
            except ProtocolError as failure:
                await self.send(error(f"Protocol error: {failure}"))
                return
            except LimitError as failure:
                await self.send(error(str(failure), "BUSY"))
                return
            if words is not None:
                yield words
                await self._pay_in(0)
                done, command_until = done + 1, 0.0
                if done % _TURN == 0:
                    await asyncio.sleep(0)
                continue
            await self._flush()
            resting = self._parser.resting
            if not resting and not command_until:
                command_until = loop.time() + self._waits.command_s
            until = loop.time() + self._waits.idle_s if resting else command_until
            async with asyncio.timeout_at(until if known() else min(until, stranger_until)):
                data = await self._reader.read(_READ_BYTES)
            if not data:
                if resting:
                    return
                raise EOFError("the client left in the middle of a command")
            self._parser.feed(data)

    async def charge(self, nbytes: int) -> None:
        """An answer of so many bytes is about to be in hand. Raises `LimitError`."""
        if nbytes > FREE_BYTES:
            await self._flush()
            await self._budget.take(nbytes)
            self._taken_out += nbytes

    async def send(self, *answers: bytes | memoryview) -> None:
        """Answer. Raises `TimeoutError` when the client takes nothing."""
        self._answers += answers
        self._gathered += sum(map(len, answers))
        if self._gathered > _GATHER_BYTES:
            await self._flush()

    async def close(self) -> None:
        """Send what is left, and end."""
        await self._flush()
        if self._writer is not None:
            self._writer.close()
            async with asyncio.timeout(self._waits.answer_s):
                await self._writer.wait_closed()

    async def abort(self) -> None:
        """End at once; what was in hand is given back."""
        if self._transport is not None:
            self._transport.abort()
        await self._budget.give(self._taken_in + self._taken_out)
        self._taken_in = self._taken_out = 0

    async def _pay_in(self, announced: int) -> None:
        """Take or give back what the command that comes in has in hand."""
        wanted = announced if announced > FREE_BYTES else 0
        if wanted > self._taken_in:
            await self._budget.take(wanted - self._taken_in)
            self._taken_in = wanted
        elif wanted == 0 and self._taken_in:
            await self._budget.give(self._taken_in)
            self._taken_in = 0

    async def _flush(self) -> None:
        if self._answers and self._writer is not None:
            answers, self._answers, self._gathered = self._answers, [], 0
            if sum(map(len, answers)) <= 2 * _GATHER_BYTES:
                answers = [b"".join(answers)]
            for part in answers:
                self._writer.write(part)
            async with asyncio.timeout(self._waits.answer_s):
                await self._writer.drain()
        if self._taken_out:
            await self._budget.give(self._taken_out)
            self._taken_out = 0
