"""Several answers to one request, as one stream of pieces.

Answers to the same prompt are led by the first of them: the others begin when it has said something, for then the prompt's blocks are there
and it is computed once. A failure of one ends all, as there is one status for the whole request.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from router.dispatch import Dispatcher
from router.generation import Generation, Piece

_AHEAD = 2
"""Pieces that each answer may be ahead of the caller."""

Event = tuple[int, Piece | None]
"""(which answer, its next piece; None: it is complete)."""


async def pieces_of(generations: Sequence[Generation], leaders: Sequence[int], dispatcher: Dispatcher) -> AsyncGenerator[Event, None]:
    """All pieces of all answers; `leaders` names for each answer the one that it waits for (itself: none). Closing it ends them all."""
    if len(generations) > 1:
        async with aclosing(_Merged(generations, leaders, dispatcher).events()) as events:
            async for event in events:
                yield event
        return
    async with aclosing(generations[0].pieces(dispatcher)) as pieces:
        async for piece in pieces:
            yield 0, piece
    yield 0, None


class _Merged:
    def __init__(self, generations: Sequence[Generation], leaders: Sequence[int], dispatcher: Dispatcher) -> None:
        self._generations = generations
        self._leaders = leaders
        self._dispatcher = dispatcher
        self._queue: asyncio.Queue[Event | Exception] = asyncio.Queue(_AHEAD * len(generations))
        self._begun = [asyncio.Event() for _ in generations]

    async def events(self) -> AsyncGenerator[Event, None]:
        """Until all are complete, or one has failed."""
        tasks = {asyncio.ensure_future(self._run(index)) for index in range(len(self._generations))}
        left = len(tasks)
        try:
            while left:
                event = await self._queue.get()
                if isinstance(event, Exception):
                    raise event
                left -= event[1] is None
                yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _run(self, index: int) -> None:
        try:
            if self._leaders[index] != index:
                await self._begun[self._leaders[index]].wait()
            async with aclosing(self._generations[index].pieces(self._dispatcher)) as pieces:
                async for piece in pieces:
                    self._begun[index].set()
                    await self._queue.put((index, piece))
            self._begun[index].set()
            await self._queue.put((index, None))
        except Exception as error:
            await self._queue.put(error)
