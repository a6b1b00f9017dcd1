"""What the judge says of processes on the node's own host: what they read without asking, what they hold, what they carve.

Theory. A reader of the board checks no checksum: that its record is still the same after the copying, or that it holds the block, is all
it has. So its bytes must be exactly right, unless a writer who outlived even its fence, or a fault, has damaged them.
"""

from collections.abc import Sequence

from kvpool.block import BlockKey
from kvpool.pool import EXISTS, NO_SPACE, Grant, Granted, PoolState, Reserve, SlabGrant
from kvpool.testing.board_twin import BoardTwin, Record
from kvpool.testing.sim.frames import is_exact
from kvpool.testing.sim.judge import Judge, Violation
from kvpool.testing.sim.truth import COMMITTED, Copy
from kvpool.testing.sim.world import UNIT


class LocalJudge:
    """Looks on for `judge`, at the same truth."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge

    def board(self, board: BoardTwin) -> None:
        """The board says what is committed, where it is, and until when."""
        committed = self._judge.truth.committed
        said = {key: (record.offset, record.length, record.expires_ns) for key, record in board.records.items()}
        if said != {key: (copy.offset, copy.length, copy.expires_ns) for key, copy in committed.items()}:
            wrong = [self._judge.name(key) for key in {**said, **committed} if (key in said) != (key in committed)]
            raise Violation(f"the board and the index differ: {wrong or 'in places'}")

    def glanced(self, record: Record, frame: bytes) -> None:
        """A reader takes these bytes without checking them."""
        judge, truth = self._judge, self._judge.truth
        start, units = record.offset // UNIT, -(-record.length // UNIT)
        if is_exact(frame, record.key, record.length):
            judge.delivered += 1
            judge.coverage.hit("block read without asking")
        elif not any(truth.tainted[start : start + units]):
            raise Violation(f"a reader of the board took wrong bytes for {judge.name(record.key)}")

    def touched(self, keys: Sequence[BlockKey]) -> None:
        """Their use is counted, as far as they are still here."""
        self._judge.truth.hits += sum(key in self._judge.truth.committed for key in keys)

    def slab(self, pool: PoolState, nbytes: int, lease_ns: int, grant: SlabGrant | None, now_ns: int) -> None:
        """Who left for a slab, what moved, whose bytes it is."""
        judge, truth = self._judge, self._judge.truth
        judge._evictions(pool, ())
        if grant is None:
            judge.coverage.hit("slab refused")
            return
        judge._moves(grant.moves)
        if grant.nbytes < nbytes or not truth.is_free(grant.offset, grant.nbytes):
            raise Violation(f"a slab of {nbytes} bytes was granted {grant.offset}+{grant.nbytes}, which is somebody's")
        judge._open(grant.lease_id, True, [], lease_ns, now_ns)
        slab = grant.offset // UNIT, grant.nbytes // UNIT
        truth.leases[grant.lease_id].slab = slab
        truth.paint_units(slab, 2)
        truth.tainted[slab[0] : sum(slab)] = bytes(slab[1])

    def carved(self, pool: PoolState, lease_id: int, items: Sequence[Reserve], grants: Sequence[Grant], now_ns: int) -> None:
        """Each block lies where it was written, each refusal is due, and gives its bytes back."""
        judge, truth = self._judge, self._judge.truth
        judge._evictions(pool, items)
        held = judge._lease(lease_id)
        if held is None or held.slab is None:
            judge.coverage.hit("carve after lease end")
            if any(grant is not NO_SPACE for grant in grants):
                raise Violation(f"carve under lease {lease_id}, which has ended, answered {grants}")
            return
        for item, grant in zip(items, grants, strict=True):
            start, units = held.slab
            size = -(-item.length // UNIT)
            held.slab = start + size, units - size
            there = item.key in truth.committed or item.key in truth.reserved
            if (grant is EXISTS) != there:
                raise Violation(f"carve of {judge.name(item.key)} answered {grant}, it {'is' if there else 'is not'} there")
            truth.paint_units((start, size), 0)
            if not isinstance(grant, Granted):
                judge.coverage.hit("carve refused a block")
                continue
            if grant.offset != start * UNIT:
                raise Violation(f"{judge.name(item.key)} was carved at {grant.offset}, and was written at {start * UNIT}")
            damaged = bytes(truth.tainted[start : start + size])
            copy = Copy(item, grant.offset, lease_id)
            truth.grant(copy)
            truth.tainted[start : start + size] = damaged
            truth.references += 1
            held.copies.append(copy)
            truth.publish(held, copy, now_ns)
            assert copy.state is COMMITTED
            judge.coverage.hit("block carved out of a slab")
        if not held.slab[1]:
            truth.end(held, now_ns)
