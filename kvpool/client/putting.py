"""Blocks written by a client to a node of its host that is to have all of them, over the session: one copy, straight into the arena.

A small batch goes to the front of a slab, that was granted before, and is published by one message; blocks that exist were copied in vain
then. A larger one is reserved and committed: two messages. The checksum is taken of each block as a whole, right before or after its copy,
while it is in the cache.

What the node has no room for now, and whatever goes wrong, is left to the way by gRPC, which waits, tries other nodes and tells who failed.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvpool.block import BlockKey, Framer
from kvpool.client.company import each
from kvpool.client.here import Limits, Rows
from kvpool.client.local import LocalReach
from kvpool.client.slabs import Slabs
from kvpool.clock import seconds_left
from kvpool.errors import KvpoolError
from kvpool.pool.allocator import aligned
from kvpool.request.pool import Outcome, Reservation, Slab
from kvpool.transport.reach import Bytes
from kvpool.wire.session import MAX_BLOCKS
from kvpool.wire.session_client import Session

log = logging.getLogger(__name__)

CALL_S = 2.0
"""Longest wait for one answer."""

Write = Callable[[int, Bytes], int]
"""Writes the payload of block j of a batch; its checksum."""


class Batch(NamedTuple):
    """Blocks to write: what is asked for each, the header's fields, and who writes the payloads. `tokens`: of each block."""

    blocks: Sequence[Reservation]
    tokens: Sequence[int]
    write: Write
    framer: Framer
    sequence: int
    tenant: str
    lacking_only: bool
    """Whether only blocks that the node lacks may be written: they are asked for first then, and not put to a slab."""
    shared: bool = False
    """Whether `write` may be called from two threads at once, in any order."""


def copying(framer: Framer, rows: Rows) -> Write:
    """Writes rows. Hashed before it is copied: the copy then reads from the cache."""

    def write(j: int, payload: Bytes) -> int:
        checksum = framer.checksum(rows[j])
        np.copyto(payload, rows[j])
        return checksum

    return write


def filling(framer: Framer, fill: Callable[[int, Bytes], None], indices: Sequence[int]) -> Write:
    """Writes what `fill(indices[j], payload)` does."""

    def write(j: int, payload: Bytes) -> int:
        fill(indices[j], payload)
        return framer.checksum(payload)

    return write


def put_here(reach: LocalReach, batch: Batch, limits: Limits) -> bool:
    """Write and publish all of a batch; whether the node has all of it now. If not, the way by gRPC is to be taken for all of them.

    What was published by then exists, and costs that way nothing.
    """
    session, slabs = reach.session, reach.slabs
    if session is None or slabs is None or not reach.enter():
        return False
    try:
        total = sum(aligned(block.length) for block in batch.blocks)
        if not batch.lacking_only and total <= slabs.largest_put and len(batch.blocks) <= MAX_BLOCKS:
            slab = slabs.take(total, _patience_s(limits))
            if slab is not None:
                return _by_slab(reach, session, slabs, slab, batch, total, limits)
        return _by_leases(reach, session, batch, limits)
    except KvpoolError as error:
        log.info("node %s: a put goes by gRPC instead: %s", reach.node_id[:8], error)
        return False
    finally:
        reach.leave()


def _by_slab(reach: LocalReach, session: Session, slabs: Slabs, slab: Slab, batch: Batch, total: int, limits: Limits) -> bool:
    at, left, written = slab.offset, slab.nbytes - total, False
    try:
        memory = reach.memory
        for j, block in enumerate(batch.blocks):
            _frame(memory[at : at + block.length], batch, j)
            at += aligned(block.length)
        written = not limits.over()
    finally:
        if not written:
            slabs.keep(slab)
    if not written:
        return False
    try:
        outcomes, fresh = session.put(
            slab.lease_id,
            batch.blocks,
            sequence=batch.sequence,
            tenant=batch.tenant,
            next_slab=slabs.slab_bytes if left < slabs.largest_put else 0,
            timeout_s=_patience_s(limits),
        )
    except BaseException:  # whether its front was published nobody knows: another put must not write there
        slabs.drop(slab)
        raise
    lost = outcomes.count(Outcome.NO_SPACE) == len(outcomes)  # the lease may be over
    if fresh is None and not lost:
        slabs.keep(Slab(slab.lease_id, at, left))
    else:
        slabs.drop(slab)
    if fresh is not None:
        slabs.keep(fresh)
    return Outcome.NO_SPACE not in outcomes


def _by_leases(reach: LocalReach, session: Session, batch: Batch, limits: Limits) -> bool:
    """As many blocks at once as a message takes: asking for the next while others are copied costs more than it saves on two cores."""
    for start in range(0, len(batch.blocks), MAX_BLOCKS):
        lease = _reserve(session, batch, limits, range(start, min(start + MAX_BLOCKS, len(batch.blocks))))
        if not (_write(reach, session, batch, limits, lease) and _commit(session, batch, limits, lease)):
            return False
    return True


class _Leased(NamedTuple):
    """What is granted: (position, offset) of each block that is missing. `refused`: something found no room."""

    lease_id: int
    granted: Sequence[tuple[int, int]]
    refused: bool


def _reserve(session: Session, batch: Batch, limits: Limits, part: range) -> _Leased:
    blocks = batch.blocks[part.start : part.stop]
    lease_id, grants, _ = session.reserve(blocks, sequence=batch.sequence, tenant=batch.tenant, timeout_s=_patience_s(limits))
    granted = [(j, offset) for j, (outcome, offset) in zip(part, grants, strict=True) if outcome is Outcome.GRANTED]
    return _Leased(lease_id, granted, any(outcome is Outcome.NO_SPACE for outcome, _ in grants))


def _write(reach: LocalReach, session: Session, batch: Batch, limits: Limits, lease: _Leased) -> bool:
    """Write what is granted; when it is too late, or there is no room for all, the lease goes back."""
    written = False
    try:
        memory = reach.memory
        if lease.refused or not session.alive:
            return False

        def write(number: int) -> bool:
            j, offset = lease.granted[number]
            if not limits.over():
                _frame(memory[offset : offset + batch.blocks[j].length], batch, j)
            return not limits.over()

        nbytes = sum(batch.blocks[j].length for j, _ in lease.granted)
        each(len(lease.granted), nbytes if batch.shared else 0, write)
        written = not limits.over()
        return written
    finally:
        if not written:
            _release(session, lease)


def _commit(session: Session, batch: Batch, limits: Limits, lease: _Leased) -> bool:
    """Publish what was written, unless it is too late; what couldn't be is given back."""
    if not lease.granted:
        return True
    done: list[bool] = []
    try:
        if not limits.over():
            done = session.commit(lease.lease_id, [batch.blocks[j].key for j, _ in lease.granted], _patience_s(limits))
        return bool(done) and all(done)
    finally:
        if not (done and all(done)):
            _release(session, lease)


def _release(session: Session, lease: _Leased) -> None:
    """Give a lease back. That it can't be is no matter: the session is over then, and its leases with it."""
    if lease.lease_id:
        with contextlib.suppress(KvpoolError):
            session.release(lease.lease_id, (), CALL_S)


def _frame(frame: Bytes, batch: Batch, j: int) -> None:
    """Write block j of a batch: payload, then header."""
    framer, block = batch.framer, batch.blocks[j]
    checksum = batch.write(j, frame[framer.header_bytes :])
    header = framer.header(BlockKey(block.key), BlockKey(block.parent), batch.tokens[j], checksum)
    frame[: framer.header_bytes] = np.frombuffer(header, np.uint8)


def _patience_s(limits: Limits) -> float:
    return max(min(CALL_S, seconds_left(limits.deadline_ns)), 0.001)
