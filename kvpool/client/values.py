"""Opaque values: bytes that an engine's own connector layer keeps under its own keys, where there are no tokens and no chain.

Theory. A value is a block of one token, the first and last of a chain of its own. So it is an extent of its own, too: where it lives
depends on its key alone, not on the batch that it came in, and whether it can be had doesn't depend on the others of a batch. Boards,
arenas, wires, tiers, copies, near copies, quotas and checksums know it as any block, and its way is a block's, in the caller's thread where
that goes.

A *scope* says whose values these are: engine, model, layout, rank, and whatever else makes equal keys mean unequal bytes. It is a namespace
(model `kvpool/values/v1`, its weights digest that of the scope), and a value's key is sha256(root of the namespace || the caller's key).
The length is not part of the key but of the frame, so one place in the pool has at most one value of a key, and who expects another length
gets none.

    sha256 over the scope: for each string u32 little-endian length, UTF-8 bytes
"""

import hashlib
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self, TypeVar, cast

from kvpool.block import BlockKey, Framer, Geometry, LayerSpec, Namespace
from kvpool.block.geometry import MAX_PAYLOAD_BYTES
from kvpool.client.arrays import Bytes, bytes_of
from kvpool.client.choose import AUTO
from kvpool.client.core import Checksums
from kvpool.client.loops import LoopThread
from kvpool.client.nearby import Nearby
from kvpool.client.sdk import connect_async
from kvpool.client.writing import Wish
from kvpool.errors import ClosedError, ConfigError, RemoteError
from kvpool.units import SECOND
from kvpool.wire.credentials import Security

T = TypeVar("T")

MODEL = "kvpool/values/v1"
MAX_VALUE_BYTES = MAX_PAYLOAD_BYTES
"""Bytes of the largest value; a node takes none that is larger than its arena."""
MAX_KEY_BYTES = 4096
_BATCH = 4096
"""Values in one message at most."""
_SIZES = 256
"""Sizes of values that are remembered at most."""
_HEAD_BYTES = 1 << 16
_U32 = struct.Struct("<I")


def value_namespace(scope: Sequence[str]) -> Namespace:
    """The namespace of the values of `scope`. Raises `ConfigError` unless it is a list of at least one text."""
    if isinstance(scope, str) or not scope or not all(isinstance(part, str) for part in scope):
        raise ConfigError(f"a scope is a list of texts that say whose values these are, such as [engine, model, layout], got {scope!r}")
    digest = hashlib.sha256()
    for part in scope:
        try:
            text = part.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"the scope holds characters that UTF-8 can't carry: {part!r}") from None
        digest.update(_U32.pack(len(text)) + text)
    return Namespace(model=MODEL, revision="", weights_digest=digest.digest(), geometry=value_geometry(1), rope="none")


def value_geometry(nbytes: int) -> Geometry:
    """The geometry of a value of `nbytes` bytes, 1..`MAX_VALUE_BYTES`: made-up layers that add up to it. Raises `ConfigError`."""
    if not 1 <= nbytes <= MAX_VALUE_BYTES:
        raise ConfigError(f"a value has 1 to {MAX_VALUE_BYTES} bytes, got {nbytes}")
    heads, rest = divmod(nbytes, _HEAD_BYTES)
    layers = [LayerSpec("full", heads, _HEAD_BYTES // 2, _HEAD_BYTES // 2)] if heads else []
    return Geometry((*layers, LayerSpec("mla", 1, rest, 0)) if rest else tuple(layers), 1, "uint8")


class ValueClient:
    """Values of one scope, for synchronous code, from any thread; a context manager.

    `source`: a cluster URL (`redis://...`) or node addresses (`host:port[,host:port...]`). `scope`: texts that say whose values these are,
    in this order; a client with another scope never finds them. `timeout_s`: the longest that one call waits for the pool. `transport`,
    `security` and `checksums` are those of `kvpool.connect`; the values of a token that is bound to a tenant are that tenant's. `threads`:
    how many calls begun by `submit` run at once, others wait.

    A key is bytes, 1 to 4,096 of them. A value is immutable: the same key of a scope always means the same bytes, and of two who put one
    each may win. A buffer is whatever has contiguous bytes: bytes, memoryviews, numpy arrays, torch tensors on the CPU. Those that are read
    into are written to in place; leave alone all that a call is given until it is back.

    A batch is one message to each node that is asked. Values of different lengths may be in it, but those of equal length travel together.
    Trouble elsewhere (a node that is gone, slow or full, a value that is damaged) makes a False, never an exception. Raises `ConfigError`
    for arguments that make no sense and `ClosedError` after `close`; the constructor also what `kvpool.connect` raises.
    """

    def __init__(
        self,
        source: str,
        *,
        scope: Sequence[str],
        transport: str = AUTO,
        timeout_s: float = 10.0,
        security: Security | None = None,
        checksums: Checksums = "wire",
        threads: int = 4,
    ) -> None:
        if not timeout_s > 0 or threads < 1:
            raise ConfigError(f"timeout_s and threads must be positive, got {timeout_s} and {threads}")
        namespace = value_namespace(scope)
        self._timeout_s = timeout_s
        self._closed = False
        self._loop = LoopThread("kvpool-values")
        try:
            opened = connect_async(
                source, namespace=namespace, transport=transport, timeout_s=timeout_s, security=security, checksums=checksums
            )
            self._client = self._loop.run(opened, timeout_s)
        except BaseException:
            self._loop.stop()
            raise
        self._namespace = self._client.pool.namespace
        self._root = self._namespace.root()
        self._nearby = self._client.pool.nearby(self._loop.loop, timeout_s)
        self._sizes: dict[int, Nearby] = {}
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvpool-values")
        self._closing = threading.Lock()

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` have a value now, of whatever length. Promises nothing, and is no use of them."""
        self._check_open()
        named, found = self.keys(keys), list[bool]()
        nearby = self._of(1)
        for start in range(0, len(named), _BATCH):
            some = named[start : start + _BATCH]
            there = nearby.present(some)
            found += there if all(there) else self._ask(nearby.present_rest(some, there)) or there
        return found

    def get(self, keys: Sequence[bytes], outs: Sequence[Any]) -> list[bool]:
        """Fill `outs[i]` with the value of `keys[i]`; which came. A value of another length than the buffer's isn't there.

        Where it hasn't come, the bytes of the buffer are unspecified.
        """
        named, rows = self.keys(keys), self._rows(keys, outs, writable=True)
        came = [False] * len(named)
        for positions in _batches(keys, rows):
            some, targets = [named[i] for i in positions], [rows[i] for i in positions]
            nearby = self._of(targets[0].size)
            got = nearby.read(some, targets)
            if not all(got):
                self._ask(nearby.read_rest(some, targets, got))
            for i, good in zip(positions, got, strict=True):
                came[i] = bool(good)
        return came

    def put(self, keys: Sequence[bytes], values: Sequence[Any], *, ttl_s: float = 0.0, tenant: str = "") -> list[bool]:
        """Make `values[i]` the value of `keys[i]`, unless it has one; for which of them the pool has a value now.

        `ttl_s`: seconds after which new values leave (0: never). `tenant`: whose quota new values count against.
        """
        named, rows = self.keys(keys), self._rows(keys, values, writable=False)
        wish, held = Wish(int(ttl_s * SECOND), (), tenant), [False] * len(named)
        for positions in _batches(keys, rows):
            some, given = [named[i] for i in positions], [rows[i] for i in positions]
            nearby = self._of(given[0].size)
            done = nearby.write_each(some, given, wish)
            left = [j for j, there in enumerate(done) if not there]
            if left:
                rest = self._ask(nearby.write_rest([some[j] for j in left], [given[j] for j in left], wish)) or [False] * len(left)
                for j, there in zip(left, rest, strict=True):
                    done[j] = there
            for i, there in zip(positions, done, strict=True):
                held[i] = there
        return held

    def keys(self, keys: Sequence[bytes]) -> list[BlockKey]:
        """The pool's keys for the caller's: what nodes and the tools of an operator call them."""
        if not set(map(type, keys)) <= {bytes} or (keys and not 0 < min(map(len, keys)) <= max(map(len, keys)) <= MAX_KEY_BYTES):
            raise ConfigError(f"keys are a list of bytes, 1 to {MAX_KEY_BYTES} each")
        sha256, root = hashlib.sha256, self._root
        return cast("list[BlockKey]", [sha256(root + key).digest() for key in keys])

    def reaches(self) -> dict[str, str]:
        """Reach in use per node id: `shm`, `ucx`, `tcp` or `grpc`, of the nodes that have been asked something so far."""
        return self._client.pool.reaches()

    def direct(self) -> dict[str, int]:
        """See `AsyncPoolClient.direct`."""
        return self._client.pool.direct()

    def submit_present(self, keys: Sequence[bytes]) -> "Future[list[bool]]":
        """`present` in a thread of the client, for those who poll (`done()`) or wait (`result()`)."""
        return self._submit(lambda: self.present(keys))

    def submit_get(self, keys: Sequence[bytes], outs: Sequence[Any]) -> "Future[list[bool]]":
        """`get` in a thread of the client. Leave the buffers alone until it is done: one that runs can't be cancelled."""
        return self._submit(lambda: self.get(keys, outs))

    def submit_put(self, keys: Sequence[bytes], values: Sequence[Any], *, ttl_s: float = 0.0, tenant: str = "") -> "Future[list[bool]]":
        """`put` in a thread of the client. Leave the values alone until it is done: one that runs can't be cancelled."""
        return self._submit(lambda: self.put(keys, values, ttl_s=ttl_s, tenant=tenant))

    def close(self) -> None:
        """Disconnect, once calls that run have ended; those that wait are cancelled. A second call does nothing."""
        with self._closing:
            if self._closed:
                return
            self._threads.shutdown(wait=True, cancel_futures=True)  # each call ends by its deadline
            self._closed = True
            self._ask(self._client.close())
            self._loop.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _of(self, nbytes: int) -> Nearby:
        """What reads and writes values of this length."""
        found = self._sizes.get(nbytes)
        if found is None:
            if len(self._sizes) >= _SIZES:
                self._sizes = {}
            framer = Framer(self._namespace, geometry=value_geometry(nbytes))
            found = self._sizes[nbytes] = self._nearby.of_values(framer)
        return found

    def _rows(self, keys: Sequence[bytes], buffers: Sequence[Any], *, writable: bool) -> list[Bytes]:
        """The buffers as rows of bytes, one a key."""
        self._check_open()
        if len(keys) != len(buffers):
            raise ConfigError(f"{len(keys)} keys, but {len(buffers)} buffers")
        rows = [bytes_of(buffer, writable=writable) for buffer in buffers]
        if not all(row.size for row in rows):
            raise ConfigError("a value has at least one byte")
        return rows

    def _ask(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What the event loop comes to; None where the trouble is elsewhere."""
        try:
            return self._loop.run(work, self._timeout_s)
        except RemoteError:
            return None

    def _submit(self, call: Callable[[], list[bool]]) -> "Future[list[bool]]":
        self._check_open()
        try:
            return self._threads.submit(call)
        except RuntimeError as error:  # its threads have ended
            raise ClosedError("this client was closed") from error

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this client was closed")


def _batches(keys: Sequence[bytes], rows: Sequence[Bytes]) -> Iterator[Sequence[int]]:
    """Positions that travel together: of equal length, no key twice, at most `_BATCH`."""
    if 0 < len(keys) <= _BATCH and len(set(keys)) == len(keys) and len({row.size for row in rows}) == 1:
        yield range(len(keys))
        return
    groups: dict[tuple[int, int], list[int]] = {}
    seen: dict[bytes, int] = {}
    for i, (key, row) in enumerate(zip(keys, rows, strict=True)):
        seen[key] = seen.get(key, 0) + 1
        groups.setdefault((row.size, seen[key]), []).append(i)
    for positions in groups.values():
        for start in range(0, len(positions), _BATCH):
            yield positions[start : start + _BATCH]
