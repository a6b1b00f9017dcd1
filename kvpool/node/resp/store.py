"""Values by name over the pool of one node: what is behind the commands.

A value is replaced by removing it and writing it anew, because blocks never change. Without a slower tier nothing can come in between;
with one a reader may find nothing meanwhile. Two who write the same name take turns.

Bytes up to 1 MiB are copied at once, longer ones by a thread, under the lease that keeps them in place. A call that is cancelled then
leaves its lease to run out, because the thread may go on.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum, auto
from typing import Any, Final
from weakref import WeakValueDictionary

from kvpool.block import BlockKey
from kvpool.errors import FrameError
from kvpool.node.admin import NodeAdmin
from kvpool.node.resp import frames
from kvpool.node.tenancy import TenantPool
from kvpool.request.admin import EvictOutcome
from kvpool.request.pool import Outcome, Reservation
from kvpool.tier import Arena

_OWNER: Final = "resp"
_LEASE_MS: Final = 60_000
_PATIENCE_S: Final = 5.0
_AT_ONCE_BYTES: Final = 1 << 20
_TRIES: Final = 3

Charge = Callable[[int], Awaitable[None]]
"""Waits until so many bytes may be taken out; raises `LimitError`."""


class Stored(Enum):
    """What became of a value."""

    STORED = auto()
    EXISTS = auto()
    NO_SPACE = auto()
    PINNED = auto()
    BUSY = auto()


class ValueStore:
    """Values of whoever `caller()` is, by their keys (`frames.key_of`)."""

    def __init__(self, pool: TenantPool, admin: NodeAdmin, arena: Arena) -> None:
        self._pool = pool
        self._admin = admin
        self._arena = arena
        self._locks: WeakValueDictionary[BlockKey, asyncio.Lock] = WeakValueDictionary()

    async def get(self, key: BlockKey, charge: Charge) -> memoryview | None:
        """The value, None where there is none (any more). It counts as a use."""
        lease_id, (place,) = await self._pool.acquire(_OWNER, _LEASE_MS, [key], sequence=0, patience_s=_PATIENCE_S, fetch_from=())
        if place is None:
            return None
        suspect: tuple[BlockKey, ...] = ()
        try:
            await charge(place[1])
            value: memoryview = await _copied(place[1], frames.read, self._arena.view(*place), key)
            return value
        except FrameError:
            suspect = (key,)
            return None
        except asyncio.CancelledError:
            lease_id = 0
            raise
        finally:
            if lease_id:
                self._pool.release(lease_id, suspect)

    async def put(self, key: BlockKey, value: bytes, *, ttl_ms: int, only_new: bool) -> Stored:
        """Keep `value` for `ttl_ms` (0: as long as there is room). `only_new`: a value that is there stays."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:
            for attempt in range(_TRIES):
                there = attempt or self._pool.lookup([key])[0]  # what is on its way up from a slower tier isn't looked up
                if there and not only_new and await self._remove(key) is EvictOutcome.PINNED:
                    return Stored.PINNED
                outcome = await self._write(key, value, ttl_ms)
                if outcome is not Stored.BUSY and (only_new or outcome is not Stored.EXISTS):
                    return outcome
        return Stored.BUSY

    def exists(self, keys: Sequence[BlockKey]) -> int:
        """How many of `keys` have a value. No use of them."""
        return sum(map(bool, self._pool.lookup(keys)))

    async def delete(self, keys: Sequence[BlockKey]) -> tuple[int, int]:
        """Remove values; how many were removed, and how many stay because an operator has pinned them."""
        outcomes = [await self._remove(key) for key in keys if self._pool.lookup([key])[0]]
        pinned = outcomes.count(EvictOutcome.PINNED)
        return len(outcomes) - pinned - outcomes.count(EvictOutcome.ABSENT), pinned

    async def _remove(self, key: BlockKey) -> EvictOutcome:
        return (await self._admin.evict([key], dry_run=False))[0]

    async def _write(self, key: BlockKey, value: bytes, ttl_ms: int) -> Stored:
        """One attempt; BUSY: the block went away before it was published."""
        block = Reservation(key, frames.PARENT, frames.DEPTH, frames.frame_bytes(len(value)), ttl_ms)
        lease_id, ((outcome, offset),) = await self._pool.reserve(
            _OWNER, _LEASE_MS, [block], sequence=0, tenant="", near=False, patience_s=_PATIENCE_S
        )
        if outcome is not Outcome.GRANTED:
            return Stored.EXISTS if outcome is Outcome.EXISTS else Stored.NO_SPACE
        await _copied(block.length, frames.write, self._arena.view(offset, block.length), key, value)
        (done,) = self._pool.commit(lease_id, [key])
        self._pool.release(lease_id, ())
        return Stored.STORED if done else Stored.BUSY


async def _copied(nbytes: int, copy: Callable[..., Any], *args: Any) -> Any:
    """What `copy` gives; beside the event loop when it takes long."""
    return copy(*args) if nbytes <= _AT_ONCE_BYTES else await asyncio.to_thread(copy, *args)
