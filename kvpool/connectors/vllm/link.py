"""The pool as an engine's process sees it: an event loop in a thread of its own; opening it is tried until the pool can be reached.

Nothing here raises for remote trouble, and every wait has a deadline: a pool that isn't there holds nothing and keeps nothing.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from kvpool.block import BlockKey, Namespace
from kvpool.client.layered import LayerTouch
from kvpool.client.nearby import Nearby
from kvpool.client.pool import AsyncPoolClient
from kvpool.client.transfer import Touch
from kvpool.errors import AccessError, ConfigError, KvpoolError
from kvpool.units import SECOND
from kvpool.wire.credentials import PLAIN, Security

log = logging.getLogger(__name__)
T = TypeVar("T")

_AGAIN_S = 1.0
_OPEN_S = 5.0
_CLOSE_S = 5.0
_REST_NS = SECOND
"""So long nobody is asked after a lookup that took all its time."""


class PoolLink:
    """The blocks of `namespace` in the pool at `source`. `lookup_s`: longest lookup. Calls come from any thread.

    Raises `ConfigError` for a source that can't be one.
    """

    def __init__(self, source: str, namespace: Namespace, *, transport: str, lookup_s: float, security: Security = PLAIN) -> None:
        self._source, self._namespace, self._transport, self._security = source, namespace, transport, security
        self._lookup_s = lookup_s
        self._rest_until_ns = 0
        self._pool: AsyncPoolClient | None = None
        self._nearby: Nearby | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvpool-link", daemon=True)
        self._thread.start()
        self._opening = asyncio.run_coroutine_threadsafe(self._open(), self._loop)
        try:
            self._opening.result(_OPEN_S)
        except TimeoutError:
            log.warning("the pool at %s wasn't found within %.0f s; the engine goes on without until it is", source, _OPEN_S)
        except BaseException:
            self._loop.call_soon_threadsafe(self._loop.stop)
            raise

    @property
    def open(self) -> bool:
        """Whether the pool has been found at all."""
        return self._pool is not None

    @property
    def here(self) -> bool:
        """Whether a node of this host is connected."""
        return self._nearby is not None and self._nearby.any

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks the pool holds, of this namespace or another. Takes `lookup_s` at most."""
        pool, nearby = self._pool, self._nearby
        started = time.monotonic_ns()
        if pool is None or nearby is None or not keys or started < self._rest_until_ns:
            return 0
        try:
            present = nearby.present(keys)
            found = len(keys) if all(present) else self._wait(pool.lookup(keys, timeout_s=self._lookup_s), self._lookup_s, 0)
        except KvpoolError as error:
            log.info("a lookup in the pool failed: %s", error)
            found = 0
        if time.monotonic_ns() - started >= self._lookup_s * SECOND:
            self._rest_until_ns = time.monotonic_ns() + _REST_NS
        return found

    def load(self, chain: Sequence[BlockKey], first: int, sink: Touch, deadline_ns: int) -> "Future[int]":
        """Deliver the leading run of chain[first:] to `sink`, which is called by another thread until the future is done."""

        async def work(pool: AsyncPoolClient) -> int:
            return await pool.load(chain, first, self._counts(chain, first), sink, deadline_ns=deadline_ns)

        return self._start(work)

    def load_layers(self, chain: Sequence[BlockKey], first: int, sink: LayerTouch, deadline_ns: int) -> "Future[int]":
        """The same layer by layer, for as many blocks as can be had so; 0 when that broke off or there are none."""

        async def work(pool: AsyncPoolClient) -> int:
            run = await pool.layers(chain, first, self._counts(chain, first), deadline_ns=deadline_ns)
            return run.blocks if run.blocks and await run.run(sink, deadline_ns=deadline_ns) else 0

        return self._start(work)

    def store(self, chain: Sequence[BlockKey], first: int, fill: Touch, deadline_ns: int) -> "Future[int]":
        """Make chain[first:] present, written by `fill`; how many of the blocks the pool holds."""

        async def work(pool: AsyncPoolClient) -> int:
            return await pool.store(chain, first, self._counts(chain, first), fill, deadline_ns=deadline_ns)

        return self._start(work)

    def close(self) -> None:
        """Disconnect. Calls under way end within their deadlines."""
        self._opening.cancel()
        pool, self._pool, self._nearby = self._pool, None, None
        if pool is not None:
            self._wait(pool.close(), _CLOSE_S, None)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _counts(self, chain: Sequence[BlockKey], first: int) -> list[int]:
        return [self._namespace.geometry.block_tokens] * (len(chain) - first)

    def _start(self, work: Callable[[AsyncPoolClient], Coroutine[Any, Any, int]]) -> "Future[int]":
        """Begin `work`; its future always has a result, 0 when something failed."""
        return asyncio.run_coroutine_threadsafe(self._safely(work), self._loop)

    async def _safely(self, work: Callable[[AsyncPoolClient], Coroutine[Any, Any, int]]) -> int:
        pool = self._pool
        if pool is None:
            return 0
        try:
            return await work(pool)
        except KvpoolError as error:
            log.warning("the pool failed: %s", error)
        except Exception:
            log.exception("moving blocks failed; the engine goes on without")
        return 0

    def _wait(self, work: Coroutine[Any, Any, T], timeout_s: float, otherwise: T) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            return otherwise

    async def _open(self) -> None:
        """Until the pool's source says who there is; addresses that nobody answers at are asked again by the client itself."""
        told = False
        while True:
            try:
                pool = await AsyncPoolClient.open(
                    self._source, self._namespace, transport=self._transport, timeout_s=_OPEN_S, eager=True, security=self._security
                )
                reasons = await pool.connect()
            except ConfigError:
                raise
            except AccessError as error:
                log.error("the pool at %s refuses: %s", self._source, error)
            except KvpoolError as error:
                if not told:
                    log.warning("the pool at %s can't be had yet: %s", self._source, error)
            else:
                for reason in reasons:
                    log.warning("a node of the pool can't be had yet: %s", reason)
                self._nearby = pool.nearby(self._loop, self._lookup_s)
                self._pool = pool
                return
            told = True
            await asyncio.sleep(_AGAIN_S)
