"""Bytes that all connections together may have in hand, beside the pool: large commands that come in and large values that go out."""

import asyncio
from typing import Final

from kvpool.errors import LimitError

FREE_BYTES: Final = 64 << 10
"""What a connection may have in hand without asking."""


class Budget:
    """`nbytes` in all; who wants more than is left waits at most `patience_s`. On one event loop."""

    def __init__(self, nbytes: int, patience_s: float) -> None:
        self.left = nbytes
        self._patience_s = patience_s
        self._given = asyncio.Condition()

    async def take(self, nbytes: int) -> None:
        """Raises `LimitError` when others don't let go in time."""
        try:
            async with asyncio.timeout(self._patience_s), self._given:
                await self._given.wait_for(lambda: self.left >= nbytes)
                self.left -= nbytes
        except TimeoutError:
            raise LimitError(f"others have too many bytes on their way to let {nbytes} more in; try again") from None

    async def give(self, nbytes: int) -> None:
        """Put back what was taken."""
        async with self._given:
            self.left += nbytes
            self._given.notify_all()
