"""What must be true of one life of a node: leases, copies of blocks and pins as the answers so far imply them.

Theory. This is a second, much simpler pool: dicts, one byte of state a unit of arena, no policy and no allocator. It doesn't decide who is
evicted or where a block lies (it is told), but everything that follows from time and from the rules is worked out here independently:
which leases have run out, which copies are gone by their ttl, what is pinned, which bytes may be handed out. `judge.py` compares.
"""

from heapq import heappop, heappush

from kvpool.block import BlockKey
from kvpool.pool import Reserve
from kvpool.testing.sim.world import UNIT

Slab = tuple[int, int]
"""Offset and units of what is left of a slab."""

RESERVED, COMMITTED, DOOMED, GONE = "reserved", "committed", "doomed", "gone"
NEVER_NS = 1 << 63


class Copy:
    """One life of a block: from its grant to the end of its bytes. `pins`: (hard, deadline) by owner; `grips`: references of read leases,
    and one more when a hard pin is among its pins (`hard`).
    """

    __slots__ = (
        "dirty",
        "expires_ns",
        "grips",
        "hard",
        "key",
        "length",
        "offset",
        "parent",
        "pins",
        "state",
        "tenant",
        "ttl_ns",
        "units",
        "writer",
    )

    def __init__(self, item: Reserve, offset: int, writer: int) -> None:
        self.key = item.key
        self.parent = item.parent
        self.offset = offset
        self.length = item.length
        self.units = -(-item.length // UNIT)
        self.ttl_ns = item.ttl_ns
        self.tenant = item.tenant
        self.writer = writer
        self.state = RESERVED
        self.expires_ns = NEVER_NS
        self.grips = 0
        self.pins: dict[str, tuple[bool, int]] = {}
        self.hard = False


class Held:
    """A live lease. `copies`: read references, or reservations not finished; `finished`: what a write lease has published; `slab`: what is
    left of its slab, None when it is of another kind.
    """

    __slots__ = ("caller", "copies", "deadline_ns", "finished", "id", "slab", "write")

    def __init__(self, lease_id: int, write: bool, copies: list[Copy], deadline_ns: int) -> None:
        self.id = lease_id
        self.write = write
        self.copies = copies
        self.finished: list[Copy] = []
        self.deadline_ns = deadline_ns
        self.caller: object = None
        self.slab: Slab | None = None


class Truth:
    """The model of one life. `units` has per 64 bytes of arena: 0 free, 1 evictable, 2 nobody may take it; `tainted` 1 where a zombie or a
    fault has written since they were last granted.
    """

    def __init__(self, capacity_bytes: int, fence_ns: int) -> None:
        self.fence_ns = fence_ns
        self.holds: dict[BlockKey, int] = {}  # by the board
        self.lingering: list[Copy] = []  # doomed, and waiting for who holds them
        self.fenced: list[Slab] = []  # whose writers may still write
        self.units = bytearray(capacity_bytes // UNIT)
        self.tainted = bytearray(capacity_bytes // UNIT)
        self.committed: dict[BlockKey, Copy] = {}
        self.reserved: dict[BlockKey, Copy] = {}
        self.leases: dict[int, Held] = {}
        self.pins = 0
        self.hard_units = 0
        self.quotas: dict[str, int] = {}
        self.tenant_units: dict[str, int] = {}
        self.references = 0
        self.writes = 0
        self.last_lease = 0
        self.hits = self.inserted = self.expired = self.ran_out = self.pins_ran_out = 0
        self._due: list[tuple[int, int, int]] = []  # (deadline, 0 lease | 1 expiry | 2 pin | 3 fence, number)
        self._waits: dict[int, Copy | tuple[Copy, str]] = {}
        self._fences: dict[int, tuple[Slab, Copy | None]] = {}
        self._number = 0

    # Bytes

    def paint(self, copy: Copy, value: int) -> None:
        """Set the state of a copy's bytes."""
        start = copy.offset // UNIT
        self.units[start : start + copy.units] = bytes((value,)) * copy.units

    def is_free(self, offset: int, length: int) -> bool:
        """Whether nobody has any of those bytes."""
        start, units = offset // UNIT, -(-length // UNIT)
        return offset % UNIT == 0 and start + units <= len(self.units) and not any(self.units[start : start + units])

    # Steps

    def grant(self, copy: Copy) -> None:
        """A reservation that nobody else's bytes overlap."""
        self.reserved[copy.key] = copy
        self.paint(copy, 2)
        self.tainted[copy.offset // UNIT : copy.offset // UNIT + copy.units] = bytes(copy.units)
        self.tenant_units[copy.tenant] = self.tenant_units.get(copy.tenant, 0) + copy.units

    def open(self, lease_id: int, write: bool, copies: list[Copy], deadline_ns: int) -> Held:
        """A new lease."""
        held = self.leases[lease_id] = Held(lease_id, write, copies, deadline_ns)
        self.last_lease = lease_id
        self.references += len(copies)
        self.writes += write
        heappush(self._due, (deadline_ns, 0, lease_id))
        return held

    def extend(self, held: Held, deadline_ns: int) -> None:
        """Never shortens."""
        if deadline_ns > held.deadline_ns:
            held.deadline_ns = deadline_ns
            heappush(self._due, (deadline_ns, 0, held.id))

    def publish(self, held: Held, copy: Copy, now_ns: int) -> bool:
        """Finish one reservation of a lease; False when it was discarded meanwhile."""
        held.copies.remove(copy)
        held.finished.append(copy)
        self.references -= 1
        if copy.state is DOOMED:
            self.forget(copy)
            return False
        del self.reserved[copy.key]
        self.committed[copy.key] = copy
        copy.state = COMMITTED
        self.paint(copy, 1)
        self.inserted += 1
        if copy.ttl_ns:
            copy.expires_ns = now_ns + copy.ttl_ns
            self._wait(copy.expires_ns, 1, copy)
        return True

    def grip(self, copy: Copy) -> None:
        """One more reader or hard pin."""
        copy.grips += 1
        if copy.grips == 1:
            self.paint(copy, 2)

    def loosen(self, copy: Copy, now_ns: int) -> None:
        """One less; the last one lets an expired or discarded copy go."""
        copy.grips -= 1
        if copy.grips:
            return
        if copy.state is DOOMED:
            self._drain(copy)
        elif copy.expires_ns <= now_ns:
            self._expire(copy)
        else:
            self.paint(copy, 1)

    def forget(self, copy: Copy) -> None:
        """Its bytes are free."""
        if copy.state is COMMITTED:
            self.unlink(copy)
        elif copy.state is RESERVED:
            del self.reserved[copy.key]
        copy.state = GONE
        self.paint(copy, 0)
        self.tenant_units[copy.tenant] -= copy.units

    def unlink(self, copy: Copy) -> None:
        """Take a committed copy out of the index, and its pins with it."""
        del self.committed[copy.key]
        self.pins -= len(copy.pins)
        copy.pins.clear()
        if copy.hard:
            copy.hard = False
            copy.grips -= 1
            self.hard_units -= copy.units

    def discard(self, copy: Copy) -> bool:
        """Unlink it at once; True when its bytes have to wait for a lease."""
        if copy.state is RESERVED:
            del self.reserved[copy.key]
        else:
            self.unlink(copy)
            if not copy.grips and copy.key in self.holds:
                copy.state = DOOMED
                self._linger(copy)
                return False
            if not copy.grips:
                self.committed[copy.key] = copy
                self.forget(copy)
                return False
        copy.state = DOOMED
        return True

    def end(self, held: Held, now_ns: int, *, ran_out: bool = False) -> None:
        """A lease is over: by release, by its deadline, or finished."""
        del self.leases[held.id]
        self.references -= len(held.copies)
        self.writes -= held.write
        fenced = ran_out and self.fence_ns > 0
        for copy in held.copies:
            if not held.write:
                self.loosen(copy, now_ns)
            elif fenced:
                if copy.state is RESERVED:
                    del self.reserved[copy.key]
                    copy.state = DOOMED
                self._fence((copy.offset // UNIT, copy.units), copy, now_ns + self.fence_ns)
            else:
                self.forget(copy)
        if held.slab is not None and held.slab[1]:
            if fenced:
                self._fence(held.slab, None, now_ns + self.fence_ns)
            else:
                self.paint_units(held.slab, 0)

    def hold(self, key: BlockKey) -> None:
        """Somebody on the host looks at a block's bytes from now on."""
        self.holds[key] = self.holds.get(key, 0) + 1

    def unhold(self, key: BlockKey) -> None:
        """One looks no more; with the last one, what waited for it is free."""
        left = self.holds.pop(key) - 1
        if left:
            self.holds[key] = left
            return
        gone = [copy for copy in self.lingering if copy.key == key]
        self.lingering = [copy for copy in self.lingering if copy.key != key]
        for copy in gone:
            self.forget(copy)

    def paint_units(self, slab: Slab, value: int) -> None:
        """Set the state of a slab's bytes."""
        start, units = slab
        self.units[start : start + units] = bytes((value,)) * units

    def _linger(self, copy: Copy) -> None:
        self.lingering.append(copy)
        self.paint(copy, 2)

    def _drain(self, copy: Copy) -> None:
        if copy.key in self.holds:
            self._linger(copy)
        else:
            self.forget(copy)

    def _fence(self, slab: Slab, copy: Copy | None, until_ns: int) -> None:
        self.fenced.append(slab)
        self._number += 1
        self._fences[self._number] = (slab, copy)
        heappush(self._due, (until_ns, 3, self._number))

    def pin(self, copy: Copy, owner: str, hard: bool, deadline_ns: int, now_ns: int) -> None:
        """Set or replace one owner's pin."""
        self.pins += owner not in copy.pins
        copy.pins[owner] = (hard, deadline_ns)
        self._wait(deadline_ns, 2, (copy, owner))
        self._repin(copy, now_ns)

    def unpin(self, copy: Copy, owner: str, now_ns: int) -> bool:
        """Drop one owner's pin. False without one."""
        if copy.pins.pop(owner, None) is None:
            return False
        self.pins -= 1
        self._repin(copy, now_ns)
        return True

    def _repin(self, copy: Copy, now_ns: int) -> None:
        hard = any(pin[0] for pin in copy.pins.values())
        if hard == copy.hard:
            return
        copy.hard = hard
        self.hard_units += copy.units if hard else -copy.units
        if hard:
            self.grip(copy)
        else:
            self.loosen(copy, now_ns)

    def settle(self, now_ns: int) -> None:
        """Everything that is due: leases, pins and ttls."""
        due = self._due
        while due and due[0][0] <= now_ns:
            deadline_ns, kind, number = heappop(due)
            if kind == 0:
                held = self.leases.get(number)
                if held is not None and held.deadline_ns == deadline_ns:
                    self.ran_out += 1
                    self.end(held, now_ns, ran_out=True)
                continue
            if kind == 3:
                slab, fenced = self._fences.pop(number)
                self.fenced.remove(slab)
                if fenced is None:
                    self.paint_units(slab, 0)
                else:
                    self.forget(fenced)
                continue
            what = self._waits.pop(number)
            if isinstance(what, Copy):
                if what.state is COMMITTED and not what.grips:
                    self._expire(what)
            else:
                copy, owner = what
                if copy.pins.get(owner, (False, 0))[1] == deadline_ns:
                    self.pins_ran_out += 1
                    self.unpin(copy, owner, now_ns)

    def next_due_ns(self) -> int:
        """When something is due next, at the latest: far away without anything."""
        return self._due[0][0] if self._due else NEVER_NS

    def _expire(self, copy: Copy) -> None:
        self.expired += 1
        if copy.key in self.holds:
            self.unlink(copy)
            copy.state = DOOMED
            self._linger(copy)
        else:
            self.forget(copy)

    def _wait(self, deadline_ns: int, kind: int, what: Copy | tuple[Copy, str]) -> None:
        self._number += 1
        self._waits[self._number] = what
        heappush(self._due, (deadline_ns, kind, self._number))
