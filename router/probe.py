"""How the router asks the pool what it holds of a prompt.

The answer only weighs a choice, so it is worth little waiting: past its time limit, or while the pool is known to be in trouble, the
choice is made without it.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from kvpool.block import BlockKey
from kvpool.clock import Clock
from kvpool.errors import RemoteError
from kvpool.units import SECOND

log = logging.getLogger("router.probe")

_REST_NS = 5 * SECOND


class PoolProbe(Protocol):
    """Asks the pool; takes no lease and changes no order."""

    async def longest_prefix(self, keys: Sequence[BlockKey], block_tokens: int, timeout_s: float) -> int:
        """How many leading `keys`, of `block_tokens` tokens each, the pool holds. Raises a `RemoteError` when it can't say in time."""
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...


class NoPool:
    """A `PoolProbe` where there is no pool."""

    async def longest_prefix(self, keys: Sequence[BlockKey], block_tokens: int, timeout_s: float) -> int:
        """Nothing is held."""
        return 0

    async def close(self) -> None:
        """Nothing to close."""


class GuardedProbe:
    """A probe that never raises and, after a failure, rests for five seconds instead of costing every request its time limit."""

    def __init__(self, probe: PoolProbe, clock: Clock, timeout_s: float) -> None:
        self._probe = probe
        self._clock = clock
        self._timeout_s = timeout_s
        self._rest_until_ns = 0

    async def longest_prefix(self, keys: Sequence[BlockKey], block_tokens: int) -> int | None:
        """How many leading `keys` the pool holds; None when that isn't known."""
        if not keys:
            return 0
        if self._clock.now_ns() < self._rest_until_ns:
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._probe.longest_prefix(keys, block_tokens, self._timeout_s)
        except (RemoteError, TimeoutError) as error:
            self._rest_until_ns = self._clock.now_ns() + _REST_NS
            log.warning("the pool does not answer probes, routing without it for 5 s: %s", error or "no answer in time")
            return None

    async def close(self) -> None:
        """Disconnect."""
        await self._probe.close()
