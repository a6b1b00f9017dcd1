"""The SDK: put, get and look up blocks by tokens. `AsyncClient` for an event loop, `Client` for everybody else."""

import asyncio
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvpool.block import Namespace
from kvpool.client.access import own_namespace
from kvpool.client.arrays import as_rows, new_blocks
from kvpool.client.choose import AUTO
from kvpool.client.pool import AsyncPoolClient
from kvpool.client.retention import Retention
from kvpool.errors import ClosedError, ConfigError, DeadlineError, UnavailableError
from kvpool.units import SECOND
from kvpool.wire.credentials import PLAIN, Security

T = TypeVar("T")
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Got:
    """`blocks[:n]` hold the KV of the first `tokens` tokens; `tokens` is 0 when nothing was cached."""

    tokens: int
    blocks: npt.NDArray[Any] | Any


class AsyncClient:
    """Blocks by tokens, on one event loop. Made by `kvpool.connect_async`."""

    def __init__(self, pool: AsyncPoolClient, timeout_s: float) -> None:
        self.pool = pool
        self._timeout_s = timeout_s

    async def lookup(self, tokens: Sequence[int]) -> int:
        """How many leading tokens of `tokens` have their KV in the pool (whole blocks). Changes nothing."""
        return await self.pool.lookup(self.pool.keys(tokens), timeout_s=self._timeout_s) * self._block_tokens

    async def get(self, tokens: Sequence[int], out: Any = None) -> Got:
        """Read the cached leading blocks of `tokens`.

        Fills `out`, a numpy array or CPU torch tensor of shape `[n, layers, 2, kv_heads, block_tokens, head_dim]` with room
        for at least the cached blocks (else only as many as fit are read); without it a new numpy array is made.
        """
        chain = self.pool.keys(tokens)
        if out is None:
            found = await self.pool.lookup(chain, timeout_s=self._timeout_s)
            out = new_blocks(self.pool.namespace.geometry, found)
        rows = as_rows(out, self.pool.namespace.geometry, writable=True)
        counts = [self._block_tokens] * min(len(chain), len(rows))

        def sink(index: int, payload: npt.NDArray[np.uint8]) -> None:
            rows[index] = payload

        got = await self.pool.load(chain, 0, counts, sink, deadline_ns=self._deadline_ns())
        return Got(tokens=got * self._block_tokens, blocks=out[:got])

    async def put(
        self, tokens: Sequence[int], blocks: Any, *, ttl_s: float = 0.0, retention: Sequence[Retention] = (), tenant: str = ""
    ) -> int:
        """Store the KV of `tokens`, one block for every whole block of tokens; how many leading tokens the pool now holds.

        `ttl_s`: seconds after which new blocks leave (0: never). `retention`: which tokens are worth keeping longer or shorter.
        `tenant`: whose quota new blocks count against.
        """
        chain = self.pool.keys(tokens)
        rows = as_rows(blocks, self.pool.namespace.geometry, writable=False)
        if len(rows) != len(chain):
            raise ConfigError(f"{len(tokens)} tokens make {len(chain)} blocks of {self._block_tokens}, but {len(rows)} were given")

        def fill(index: int, payload: npt.NDArray[np.uint8]) -> None:
            payload[:] = rows[index]

        counts = [self._block_tokens] * len(chain)
        held = await self.pool.store(
            chain, 0, counts, fill, deadline_ns=self._deadline_ns(), ttl_ns=int(ttl_s * SECOND), retention=retention, tenant=tenant
        )
        return held * self._block_tokens

    async def close(self) -> None:
        """Disconnect."""
        await self.pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def _block_tokens(self) -> int:
        return self.pool.namespace.geometry.block_tokens

    def _deadline_ns(self) -> int:
        return time.monotonic_ns() + int(self._timeout_s * SECOND)


class Client:
    """Blocks by tokens, for synchronous code, from any thread. Made by `kvpool.connect`; a context manager."""

    def __init__(self, source: str, namespace: Namespace, transport: str, timeout_s: float, security: Security | None = None) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvpool-client", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._client = self._run(
                connect_async(source, namespace=namespace, transport=transport, timeout_s=timeout_s, security=security)
            )
        except BaseException:
            self._stop()
            raise

    def lookup(self, tokens: Sequence[int]) -> int:
        """See `AsyncClient.lookup`."""
        return self._run(self._client.lookup(tokens))

    def get(self, tokens: Sequence[int], out: Any = None) -> Got:
        """See `AsyncClient.get`."""
        return self._run(self._client.get(tokens, out))

    def put(self, tokens: Sequence[int], blocks: Any, *, ttl_s: float = 0.0, retention: Sequence[Retention] = (), tenant: str = "") -> int:
        """See `AsyncClient.put`."""
        return self._run(self._client.put(tokens, blocks, ttl_s=ttl_s, retention=retention, tenant=tenant))

    def close(self) -> None:
        """Disconnect. A second call does nothing."""
        if not self._closed:
            self._run(self._client.close())
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            raise ClosedError("this client was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(self._timeout_s + _GRACE_S)
        except TimeoutError as error:
            future.cancel()
            raise DeadlineError(f"the pool took longer than {self._timeout_s + _GRACE_S:.1f} s") from error

    def _stop(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GRACE_S)
        self._loop.close()


async def connect_async(
    source: str, *, namespace: Namespace, transport: str = "auto", timeout_s: float = 10.0, security: Security | None = None
) -> AsyncClient:
    """Connect to a pool: `source` is a cluster URL (`redis://…`) or node addresses (`host:port[,host:port…]`).

    `namespace` says whose blocks these are (model, weights, geometry, tenant); `transport` is `auto`, `shm`, `ucx` or `grpc`.
    `security` holds certificates and a token, by default those that the environment names (`Security.from_environment`); the blocks of a
    token that is bound to a tenant get that tenant's salt, which a node tells. Raises `ConfigError`; with `security`, `AccessError`, and
    `UnavailableError` when no node answers; `UnavailableError` too when a transport is named by which no node can be reached. Otherwise
    it connects without a node all the same: nobody there is a miss.
    """
    security = Security.from_environment() if security is None else security
    if security != PLAIN:
        namespace = await own_namespace(source, namespace, security, timeout_s)
    pool = await AsyncPoolClient.open(source, namespace, transport=transport, timeout_s=timeout_s, security=security)
    try:
        reasons = await pool.connect() if transport != AUTO else []
        if reasons and not pool.reaches():
            raise UnavailableError(f"no node can be reached by {transport}: {'; '.join(reasons)}")
    except BaseException:
        await pool.close()
        raise
    return AsyncClient(pool, timeout_s)


def connect(
    source: str, *, namespace: Namespace, transport: str = "auto", timeout_s: float = 10.0, security: Security | None = None
) -> Client:
    """Connect to a pool from synchronous code; see `connect_async`."""
    return Client(source, namespace, transport, timeout_s, security)
