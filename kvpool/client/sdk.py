"""The SDK: put, get and look up blocks by tokens. `AsyncClient` for an event loop, `Client` for everybody else."""

import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvpool.block import BlockKey, Namespace
from kvpool.client.access import own_namespace
from kvpool.client.arrays import as_rows, new_blocks, rows_of
from kvpool.client.choose import AUTO
from kvpool.client.core import Checksums
from kvpool.client.loops import LoopThread
from kvpool.client.pool import AsyncPoolClient
from kvpool.client.retention import Retention, check_retention
from kvpool.client.views import View
from kvpool.client.writing import Wish
from kvpool.errors import ClosedError, ConfigError, UnavailableError
from kvpool.units import SECOND
from kvpool.wire.credentials import PLAIN, Security

if TYPE_CHECKING:
    from kvpool.client.device import DeviceBlocks

T = TypeVar("T")


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
        return await self.lookup_blocks(self.pool.keys(tokens)) * self._block_tokens

    async def lookup_blocks(self, chain: Sequence[BlockKey]) -> int:
        """How many leading blocks of a chain of keys (`AsyncPoolClient.keys`) the pool holds."""
        return await self.pool.lookup(chain, timeout_s=self._timeout_s)

    async def get(self, tokens: Sequence[int], out: Any = None) -> Got:
        """Read the cached leading blocks of `tokens`.

        Fills `out`, a numpy array or CPU torch tensor of shape `[n, layers, 2, kv_heads, block_tokens, head_dim]` with room
        for at least the cached blocks (else only as many as fit are read); without it a new numpy array is made. Blocks of `out` behind
        the cached ones may be written to, too.
        """
        return await self.get_blocks(self.pool.keys(tokens), out)

    async def get_blocks(self, chain: Sequence[BlockKey], out: Any = None) -> Got:
        """`get` by keys."""
        if out is None:
            found = await self.lookup_blocks(chain)
            out = new_blocks(self.pool.namespace.geometry, found)
        rows = as_rows(out, self.pool.namespace.geometry, writable=True)
        got = await self.pool.load_into(chain, 0, list(rows[: len(chain)]), deadline_ns=self._deadline_ns())
        return Got(tokens=got * self._block_tokens, blocks=out[:got])

    async def put(
        self, tokens: Sequence[int], blocks: Any, *, ttl_s: float = 0.0, retention: Sequence[Retention] = (), tenant: str = ""
    ) -> int:
        """Store the KV of `tokens`, one block for every whole block of tokens; how many leading tokens the pool now holds.

        `ttl_s`: seconds after which new blocks leave (0: never). `retention`: which tokens are worth keeping longer or shorter.
        `tenant`: whose quota new blocks count against.
        """
        held = await self.put_blocks(self.pool.keys(tokens), blocks, ttl_s=ttl_s, retention=retention, tenant=tenant)
        return held * self._block_tokens

    async def put_blocks(
        self, chain: Sequence[BlockKey], blocks: Any, *, ttl_s: float = 0.0, retention: Sequence[Retention] = (), tenant: str = ""
    ) -> int:
        """`put` by keys; how many blocks the pool now holds."""
        rows = rows_of(chain, blocks, self.pool.namespace.geometry)

        def fill(index: int, payload: npt.NDArray[np.uint8]) -> None:
            np.copyto(payload, rows[index])

        counts = [self._block_tokens] * len(chain)
        return await self.pool.store(
            chain, 0, counts, fill, deadline_ns=self._deadline_ns(), ttl_ns=int(ttl_s * SECOND), retention=retention, tenant=tenant
        )

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
    """Blocks by tokens, for synchronous code, from any thread. Made by `kvpool.connect`; a context manager.

    What nodes of this host have, or nodes that answer keys, is read, looked up and written in the caller's thread (`nearby.py`), the rest
    by an `AsyncClient` on an event loop in a thread of its own. The calls that end in `_blocks` take a chain of keys (`keys`) for those who
    keep them.
    """

    def __init__(
        self,
        source: str,
        namespace: Namespace,
        transport: str,
        timeout_s: float,
        security: Security | None = None,
        checksums: Checksums = "wire",
    ) -> None:
        self._timeout_s = timeout_s
        self._loop = LoopThread("kvpool-client")
        self._closed = False
        try:
            self._client = self._run(
                connect_async(source, namespace=namespace, transport=transport, timeout_s=timeout_s, security=security, checksums=checksums)
            )
        except BaseException:
            self._stop()
            raise
        self._nearby = self._client.pool.nearby(self._loop.loop, timeout_s)
        self._geometry = self._client.pool.namespace.geometry
        self._block_tokens = self._geometry.block_tokens
        self._has_local_reach = transport in (AUTO, "shm")

    def keys(self, tokens: Sequence[int]) -> list[BlockKey]:
        """The chain of `tokens`: a key a full block, the same as long as the namespace is."""
        return self._client.pool.keys(tokens)

    def lookup(self, tokens: Sequence[int]) -> int:
        """See `AsyncClient.lookup`."""
        return self.lookup_blocks(self.keys(tokens)) * self._block_tokens

    def lookup_blocks(self, chain: Sequence[BlockKey]) -> int:
        """See `AsyncClient.lookup_blocks`."""
        self._check_open()
        present = self._nearby.present(chain)
        return len(chain) if all(present) else self._run(self._nearby.leading(chain, present))

    def get(self, tokens: Sequence[int], out: Any = None) -> Got:
        """See `AsyncClient.get`."""
        return self.get_blocks(self.keys(tokens), out)

    def get_blocks(self, chain: Sequence[BlockKey], out: Any = None) -> Got:
        """See `AsyncClient.get_blocks`. `out` may be a CUDA tensor of torch's, too (`device.py`)."""
        self._check_open()
        if getattr(out, "is_cuda", False):
            came = self._device.get(chain, out)
            return Got(tokens=came * self._block_tokens, blocks=out[:came])
        if out is None:
            out = new_blocks(self._geometry, self.lookup_blocks(chain))
        rows = as_rows(out, self._geometry, writable=True)
        count = min(len(chain), len(rows))
        filled = self._nearby.read(chain[:count], rows)
        if not all(filled):
            count = self._run(self._nearby.read_rest(chain, rows, filled))
        return Got(tokens=count * self._block_tokens, blocks=out[:count])

    def put(self, tokens: Sequence[int], blocks: Any, *, ttl_s: float = 0.0, retention: Sequence[Retention] = (), tenant: str = "") -> int:
        """See `AsyncClient.put`."""
        return self.put_blocks(self.keys(tokens), blocks, ttl_s=ttl_s, retention=retention, tenant=tenant) * self._block_tokens

    def put_blocks(
        self, chain: Sequence[BlockKey], blocks: Any, *, ttl_s: float = 0.0, retention: Sequence[Retention] = (), tenant: str = ""
    ) -> int:
        """See `AsyncClient.put_blocks`. `blocks` may be a CUDA tensor of torch's, too (`device.py`)."""
        self._check_open()
        check_retention(retention)
        wish = Wish(int(ttl_s * SECOND), retention, tenant)
        if getattr(blocks, "is_cuda", False):
            return self._device.put(chain, blocks, wish)
        if self._nearby.write(chain, rows_of(chain, blocks, self._geometry), wish):
            return len(chain)
        return self._run(self._client.put_blocks(chain, blocks, ttl_s=ttl_s, retention=retention, tenant=tenant))

    def view(self, tokens: Sequence[int]) -> View:
        """The leading blocks of `tokens` that a node of this host has in memory, as read-only arrays without a copy; see `View`.

        Close it: the node keeps the blocks where they are until then. Raises `ConfigError` for a transport that has no way to them.
        """
        return self.view_blocks(self.keys(tokens))

    def view_blocks(self, chain: Sequence[BlockKey]) -> View:
        """`view` by keys."""
        self._check_open()
        if not self._has_local_reach:
            raise ConfigError("views take the transport auto or shm: they show the memory of a node of this host")
        if not self._nearby.any:
            self._run(self._client.pool.connect())
        return self._nearby.view(chain)

    def close(self) -> None:
        """Disconnect. A second call does nothing. Open views stay good until they are closed, for as long as their node lives."""
        if not self._closed:
            self._run(self._client.close())
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @cached_property
    def _device(self) -> "DeviceBlocks":
        from kvpool.client.device import DeviceBlocks

        return DeviceBlocks(self._nearby, self._client.pool, self._run, self._timeout_s)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this client was closed")

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            self._check_open()
        return self._loop.run(work, self._timeout_s)

    def _stop(self) -> None:
        self._closed = True
        self._loop.stop()


async def connect_async(
    source: str,
    *,
    namespace: Namespace,
    transport: str = "auto",
    timeout_s: float = 10.0,
    security: Security | None = None,
    checksums: Checksums = "wire",
) -> AsyncClient:
    """Connect to a pool: `source` is a cluster URL (`redis://…`) or node addresses (`host:port[,host:port…]`).

    `namespace` says whose blocks these are (model, weights, geometry, tenant); `transport` is `auto`, `shm`, `ucx`, `tcp` or `grpc`.
    `checksums` is as in `AsyncPoolClient.open`.
    `security` holds certificates and a token, by default those that the environment names (`Security.from_environment`); the blocks of a
    token that is bound to a tenant get that tenant's salt, which a node tells. Raises `ConfigError`; with `security`, `AccessError`, and
    `UnavailableError` when no node answers; `UnavailableError` too when a transport is named by which no node can be reached. Otherwise
    it connects without a node all the same: nobody there is a miss.
    """
    security = Security.from_environment() if security is None else security
    if security != PLAIN:
        namespace = await own_namespace(source, namespace, security, timeout_s)
    pool = await AsyncPoolClient.open(source, namespace, transport=transport, timeout_s=timeout_s, security=security, checksums=checksums)
    try:
        reasons = await pool.connect() if transport != AUTO else []
        if reasons and not pool.reaches():
            raise UnavailableError(f"no node can be reached by {transport}: {'; '.join(reasons)}")
    except BaseException:
        await pool.close()
        raise
    return AsyncClient(pool, timeout_s)


def connect(
    source: str,
    *,
    namespace: Namespace,
    transport: str = "auto",
    timeout_s: float = 10.0,
    security: Security | None = None,
    checksums: Checksums = "wire",
) -> Client:
    """Connect to a pool from synchronous code; see `connect_async`."""
    return Client(source, namespace, transport, timeout_s, security, checksums)
