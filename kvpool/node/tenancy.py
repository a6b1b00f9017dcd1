"""What a tenant sees of a node: its own blocks, and nothing that tells of anybody else's.

`TenantPool` stands between the wire and the node's handler. A caller that is bound to no tenant (workers, operators, everybody on an open
node) passes through; only with the right `worker` may it speak for tenants. For one that is bound:

* `reserve` writes in the tenant's name whatever the call says, and never near copies, which count against no quota.
* A block of another tenant, or of nobody, is absent: `lookup` says 0, `acquire` misses, `reserve` says NO_SPACE. Not EXISTS, which would
  say that somebody has it; not GRANTED, which would overwrite it. Keys hold the tenant's salt, so only who was told a key meets this.
* A lease belongs to the tenant that took it; to others its number means nothing. Operators see it under the principal's name. It is
  paid for when it is taken, so no more bytes move under it than twice what it covers.
* `describe` offers no shared memory, no UCX and no TCP, which open the whole arena, and shows no books: they would tell what others do.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.block import KEY_BYTES, BlockKey
from kvpool.clock import Clock
from kvpool.errors import AccessError, ConfigError, LimitError
from kvpool.node.handler import NodeHandler
from kvpool.node.tiers import Tiers
from kvpool.policy.rates import Rates
from kvpool.pool import PoolState
from kvpool.request.pool import Grant, NodeDescription, Outcome, Place, Reservation, Stored
from kvpool.security.principal import Right
from kvpool.units import MS
from kvpool.wire.auth import caller
from kvpool.wire.fence import NodeIdentity

Owners = Callable[[Sequence[BlockKey]], list[str | None]]
"""The tenant of each key's block, None where no such block is kept."""

_SWEEP_AT = 1024
_MAX_LEASE_MS = 3_600_000
_TIMES = 2


class _Lease(NamedTuple):
    """Whose it is, until when, how many bytes may still move under it, and the keys it is for if it is for writing."""

    tenant: str
    until_ns: int
    left: int
    writes: tuple[bytes, ...] = ()


class TenantPool:
    """`PoolHandler` that shows a tenant its own part of `inner`."""

    def __init__(self, inner: NodeHandler, owners: Owners, clock: Clock, rates: Rates | None = None) -> None:
        self._inner = inner
        self._owners = owners
        self._clock = clock
        self._rates = rates
        self._leases: dict[int, _Lease] = {}
        self._writing: dict[bytes, int] = {}
        self._sweep_at = _SWEEP_AT

    @property
    def identity(self) -> NodeIdentity:
        """Who answers."""
        return self._inner.identity

    def describe(self) -> NodeDescription:
        """See the top of the file; offers of memory go to those with the right `map` only."""
        full, who = self._inner.describe(), caller()
        if not who.may(Right.MAP):
            full = replace(full, shm=None, ucx=None, tcp=None)
        if who.tenant is None:
            return full
        return replace(full, free_bytes=0, used_bytes=0, pinned_bytes=0, blocks=0, read_leases=0, write_leases=0, counters={})

    def lookup(self, keys: Sequence[bytes]) -> bytes:
        """See `PoolHandler.lookup`."""
        tenant = caller().tenant
        present = self._inner.lookup(keys)
        if tenant is None:
            return present
        return bytes(at if mine else 0 for at, mine in zip(present, self._mine(keys, tenant), strict=True))

    async def reserve(
        self, owner: str, lease_ms: int, blocks: Sequence[Reservation], *, sequence: int, tenant: str, near: bool, patience_s: float
    ) -> tuple[int, list[Grant]]:
        """See `PoolHandler.reserve`."""
        who = caller()
        if who.tenant is None:
            if (tenant or near) and not who.may(Right.WORKER):
                raise AccessError(f"{who.name} may not write for tenants, nor near copies: that takes the right worker")
            return await self._inner.reserve(owner, lease_ms, blocks, sequence=sequence, tenant=tenant, near=near, patience_s=patience_s)
        if near:
            raise AccessError("near copies are made by the deployment's own workers")
        if tenant not in ("", who.tenant):
            raise AccessError(f"{who.name} writes for tenant {who.tenant}, not for another one; leave the tenant out")
        kept = self._owners([_key(block.key) for block in blocks])
        wanted = [block for block, of in zip(blocks, kept, strict=True) if of in (None, who.tenant)]
        lease_id, grants = await self._inner.reserve(
            f"{who.name}: {owner}", lease_ms, wanted, sequence=sequence, tenant=who.tenant, near=False, patience_s=patience_s
        )
        granted = [block for block, grant in zip(wanted, grants, strict=True) if grant[0] is Outcome.GRANTED]
        if lease_id:
            nbytes = sum(block.length for block in granted)
            self._note(lease_id, who.tenant, lease_ms, nbytes, tuple(block.key for block in granted))
        answers = iter([self._own(block.key, grant, who.tenant) for block, grant in zip(wanted, grants, strict=True)])
        return lease_id, [next(answers) if of in (None, who.tenant) else (Outcome.NO_SPACE, 0) for of in kept]

    def commit(self, lease_id: int, keys: Sequence[bytes]) -> list[bool]:
        """See `PoolHandler.commit`."""
        return self._inner.commit(lease_id, keys) if self._holds(lease_id) else [False] * len(keys)

    async def acquire(
        self, owner: str, lease_ms: int, keys: Sequence[bytes], *, sequence: int, patience_s: float, fetch_from: Sequence[str]
    ) -> tuple[int, list[Place | None]]:
        """See `PoolHandler.acquire`. What comes from other nodes is looked at again before the tenant gets it."""
        who = caller()
        tenant, signed = who.tenant, f"{who.name}: {owner}"
        if tenant is None:
            return await self._inner.acquire(owner, lease_ms, keys, sequence=sequence, patience_s=patience_s, fetch_from=fetch_from)
        kept = self._owners([_key(key) for key in keys])
        wanted = [key for key, of in zip(keys, kept, strict=True) if of in (None, tenant)]
        lease_id, places = await self._inner.acquire(
            signed, lease_ms, wanted, sequence=sequence, patience_s=patience_s, fetch_from=fetch_from
        )
        mine = self._mine(wanted, tenant)
        if any(place is not None and not own for place, own in zip(places, mine, strict=True)):
            self._inner.release(lease_id, ())
            wanted = [key for key, own in zip(wanted, mine, strict=True) if own]
            lease_id, places = await self._inner.acquire(signed, lease_ms, wanted, sequence=sequence, patience_s=0.0, fetch_from=())
        if lease_id:
            self._note(lease_id, tenant, lease_ms, sum(place[1] for place in places if place is not None))
        found = dict(zip(wanted, places, strict=True))
        return lease_id, [found.get(key) for key in keys]

    def stored(self, keys: Sequence[bytes]) -> list[Stored | None]:
        """For the deployment's own nodes only."""
        if not caller().may(Right.WORKER):
            raise AccessError("what it takes to store blocks elsewhere is told to the deployment's own nodes only")
        return self._inner.stored(keys)

    def renew(self, lease_id: int, lease_ms: int) -> bool:
        """See `PoolHandler.renew`."""
        alive = self._holds(lease_id) and self._inner.renew(lease_id, lease_ms)
        known = self._leases.get(lease_id)
        if alive and known is not None:
            self._leases[lease_id] = known._replace(until_ns=max(known.until_ns, self._until(lease_ms)))
        return alive

    def release(self, lease_id: int, suspect: Sequence[bytes]) -> None:
        """See `PoolHandler.release`."""
        tenant = caller().tenant
        if tenant is not None:
            if not self._holds(lease_id):
                return
            suspect = [key for key, mine in zip(suspect, self._mine(suspect, tenant), strict=True) if mine]
        self._forget(lease_id)
        self._inner.release(lease_id, suspect)

    def window(self, lease_id: int, offset: int, length: int, *, write: bool) -> npt.NDArray[np.uint8]:
        """See `PoolHandler.window`."""
        if not self._holds(lease_id):
            raise ConfigError(f"range {offset}+{length} is not covered by lease {lease_id}; it may have ended")
        window = self._inner.window(lease_id, offset, length, write=write)
        known = self._leases.get(lease_id)
        if known is not None:
            if length > known.left:
                raise LimitError(f"lease {lease_id} has moved its bytes {_TIMES} times; take another one")
            self._leases[lease_id] = known._replace(left=known.left - length)
        return window

    def _mine(self, keys: Sequence[bytes], tenant: str) -> list[bool]:
        return [of == tenant for of in self._owners([_key(key) for key in keys])]

    def _own(self, key: bytes, grant: Grant, tenant: str) -> Grant:
        """EXISTS only for a block of this tenant, or one that it is writing itself."""
        if grant[0] is not Outcome.EXISTS or self._mine([key], tenant)[0]:
            return grant
        lease = self._leases.get(self._writing.get(key, 0))
        return grant if lease is not None and lease.tenant == tenant else (Outcome.NO_SPACE, 0)

    def _holds(self, lease_id: int) -> bool:
        """Whether the caller may use this lease."""
        tenant = caller().tenant
        known = self._leases.get(lease_id)
        return tenant is None or (known is not None and known.tenant == tenant)

    def _note(self, lease_id: int, tenant: str, lease_ms: int, nbytes: int, writes: tuple[bytes, ...] = ()) -> None:
        """Keep whose lease this is, and let the tenant pay for what it covers."""
        if len(self._leases) >= self._sweep_at:
            now_ns = self._clock.now_ns()
            for ended in [number for number, lease in self._leases.items() if lease.until_ns <= now_ns]:
                self._forget(ended)
            self._sweep_at = max(_SWEEP_AT, 2 * len(self._leases))
        self._leases[lease_id] = _Lease(tenant, self._until(lease_ms), _TIMES * nbytes, writes)
        self._writing.update(dict.fromkeys(writes, lease_id))
        if self._rates is not None and nbytes:
            self._rates.paid(tenant, nbytes, self._clock.now_ns())

    def _forget(self, lease_id: int) -> None:
        lease = self._leases.pop(lease_id, None)
        for key in () if lease is None else lease.writes:
            if self._writing.get(key) == lease_id:
                del self._writing[key]

    def _until(self, lease_ms: int) -> int:
        return self._clock.now_ns() + min(lease_ms, _MAX_LEASE_MS) * MS


def owners_in(state: PoolState, tiers: Tiers) -> Owners:
    """Whose the blocks of a node are, in whatever tier."""

    def owners(keys: Sequence[BlockKey]) -> list[str | None]:
        views = [state.view(key) for key in keys]
        lower = tiers.find(keys)
        return [
            view.tenant if view is not None else found.entry.tenant if found is not None else None
            for view, found in zip(views, lower, strict=True)
        ]

    return owners


def _key(raw: bytes) -> BlockKey:
    if len(raw) != KEY_BYTES:
        raise ConfigError(f"a block key has {KEY_BYTES} bytes, got {len(raw)}")
    return BlockKey(raw)
