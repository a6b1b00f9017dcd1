"""The blocking half of a transfer, over the in-memory reach."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.block import BlockKey, Framer, Geometry, Namespace, chain_keys
from kvpool.client.transfer import WINDOW_BYTES, Lease, Payload, Stages, Transfer
from kvpool.errors import DeadlineError, RemoteError, UnavailableError
from kvpool.transport import MemoryNode, MemoryReach
from kvpool.units import SECOND

GEOMETRY = Geometry.uniform(layers=1, kv_heads=1, head_dim=8, block_tokens=4, dtype="float32")
FRAMER = Framer(Namespace(model="m", revision="1", weights_digest=bytes(32), geometry=GEOMETRY, rope="none"))
LENGTH = FRAMER.frame_bytes(4)
CHAIN = chain_keys(FRAMER.root, list(range(4 * 6)), 4)


class World:
    """An arena and transfers of `CHAIN`'s blocks over it."""

    def __init__(self) -> None:
        self.arena = np.zeros(6 * LENGTH, np.uint8)
        self.reach: Any = MemoryReach(MemoryNode(self.arena))
        self.stages = Stages(LENGTH)

    def transfer(self, indices: range, *, chain: list[BlockKey] = CHAIN, within_s: float = 30) -> Transfer:
        link: Any = SimpleNamespace(reach=self.reach)
        return Transfer(
            leases=[Lease(link, 1)],
            pieces=[(i, LENGTH, ((0, i * LENGTH),)) for i in indices],
            chain=chain,
            counts=dict.fromkeys(indices, 4),
            deadline_ns=time.monotonic_ns() + int(within_s * SECOND),
        )

    def written(self) -> "World":
        self.transfer(range(6)).write(FRAMER, self.stages, fill)
        return self


def fill(index: int, payload: Payload) -> None:
    payload[:] = index + 1


class Sink(list[int]):
    """The indices that came, each with the right bytes."""

    def __call__(self, index: int, payload: Payload) -> None:
        assert np.all(payload == index + 1)
        self.append(index)


def test_read_delivers_what_was_written_in_order() -> None:
    """Frames go out stamped and come back validated."""
    sink, world = Sink(), World().written()
    transfer = world.transfer(range(1, 6))
    transfer.read(FRAMER, world.stages, sink)
    assert sink == [1, 2, 3, 4, 5]
    assert (transfer.done, transfer.suspect, transfer.failed) == (5, {}, {})


def test_read_stops_at_a_damaged_frame_and_names_it() -> None:
    """What comes after a hole is useless; the node is told what to look at."""
    sink, world = Sink(), World().written()
    world.arena[2 * LENGTH + FRAMER.header_bytes] ^= 1
    transfer = world.transfer(range(6))
    transfer.read(FRAMER, world.stages, sink)
    assert sink == [0, 1]
    assert (transfer.done, transfer.suspect) == (2, {0: [2]})


def test_read_of_values_goes_on_behind_a_damaged_one() -> None:
    """They are no chain: each is worth having by itself, and follows nothing."""
    sink, world = Sink(), World()
    values = [replace(world.transfer(range(6)), apart=True) for _ in range(2)]
    values[0].write(FRAMER, world.stages, fill)
    parents = {FRAMER.open(world.arena[i * LENGTH : (i + 1) * LENGTH], CHAIN[i]).parent for i in range(6)}
    world.arena[2 * LENGTH + FRAMER.header_bytes] ^= 1
    values[1].read(FRAMER, world.stages, sink)
    assert sink == values[1].delivered == [0, 1, 3, 4, 5]
    assert (values[1].done, values[1].suspect, parents) == (5, {0: [2]}, {FRAMER.root})


def test_frame_of_another_block_or_another_length_is_not_delivered() -> None:
    """The bytes of some other block, though sound, are not an answer."""
    world = World().written()
    other = chain_keys(FRAMER.root, [9] * 24, 4)
    wrong_key = world.transfer(range(6), chain=other)
    wrong_key.read(FRAMER, world.stages, Sink())
    assert wrong_key.suspect == {0: [0]}
    shorter = world.transfer(range(1))
    shorter.counts = {0: 3}
    shorter.read(FRAMER, world.stages, Sink())
    assert (shorter.done, shorter.suspect) == (0, {0: [0]})


def test_stopped_or_late_transfer_ends_without_blaming_anybody() -> None:
    """A caller that went away, or a host too busy to start in time, says nothing about the node."""
    world = World().written()
    stopped, late = world.transfer(range(6)), world.transfer(range(6), within_s=-1)
    stopped.stopped.set()
    for transfer in (stopped, late):
        transfer.read(FRAMER, world.stages, Sink())
        transfer.write(FRAMER, world.stages, fill)
        assert (transfer.done, transfer.failed) == (0, {})


class Failing:
    """A reach that serves `good` calls and then fails; `Reach` as far as it is used."""

    def __init__(self, reach: Any, good: int, error: RemoteError, name: str = "memory") -> None:
        self.name = name
        self._reach, self._good, self._error = reach, good, error
        self.deadlines_ns: list[int] = []

    def _call(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.deadlines_ns.append(kwargs["deadline_ns"])
        self._good -= 1
        if self._good < 0:
            raise self._error
        getattr(self._reach, name)(*args, **kwargs)

    def read(self, *args: Any, **kwargs: Any) -> None:
        """See `Reach`."""
        self._call("read", *args, **kwargs)

    def write(self, *args: Any, **kwargs: Any) -> None:
        """See `Reach`."""
        self._call("write", *args, **kwargs)


def test_failing_lease_is_named_and_what_was_done_counts() -> None:
    """The caller learns where it went wrong, and keeps what had arrived before."""
    world = World().written()
    world.reach = Failing(world.reach, 1, UnavailableError("gone"))
    world.stages.nbytes = 2 * LENGTH
    transfer, sink = world.transfer(range(6)), Sink()
    transfer.read(FRAMER, world.stages, sink)
    assert (sink, transfer.done, list(transfer.failed), transfer.used) == ([0, 1], 2, [0], {0})


def test_late_copy_in_memory_blames_no_node() -> None:
    """A host that is too busy to copy says nothing about the node, and what lies in the buffer is not looked at."""
    world = World().written()
    world.reach = Failing(world.reach, 1, DeadlineError("late"), name="shm")
    world.stages.nbytes = 2 * LENGTH
    transfer, sink = world.transfer(range(6)), Sink()
    transfer.read(FRAMER, world.stages, sink)
    assert (sink, transfer.done, transfer.failed, transfer.suspect) == ([0, 1], 2, {}, {})


def test_node_that_had_too_little_time_has_not_failed() -> None:
    """A caller's deadline that no slow link could keep says nothing about the node."""
    world = World().written()
    world.reach = Failing(world.reach, 0, DeadlineError("late"))
    impatient, patient = world.transfer(range(6), within_s=0.4), world.transfer(range(6))
    for transfer in (impatient, patient):
        transfer.read(FRAMER, world.stages, Sink())
    assert (impatient.late, impatient.failed) == ({0}, {})
    assert (patient.late, list(patient.failed)) == (set(), [0])


@pytest.mark.parametrize("good", [0, 1])
def test_read_from_two_nodes_ends_where_the_failing_one_begins(good: int) -> None:
    """In one window: blocks of the other node before that are delivered, those behind are not, nor anything of the window before."""
    world, other = World().written(), World().written()
    world.stages.nbytes = 3 * LENGTH
    transfer = world.transfer(range(6))
    failing: Any = SimpleNamespace(reach=Failing(other.reach, good, UnavailableError("gone")))
    transfer.leases = [*transfer.leases, Lease(failing, 2)]
    transfer.pieces = [(i, LENGTH, ((int(i in (1, 4)), i * LENGTH),)) for i in range(6)]
    sink = Sink()
    transfer.read(FRAMER, world.stages, sink)
    assert sink == list(range(4 if good else 1))
    assert list(transfer.failed) == [1]


@pytest.mark.parametrize("good", [0, 1])
def test_write_of_two_copies_goes_on_when_one_place_fails(good: int) -> None:
    """The other copy is written to the end, the failed one is not said to be."""
    world, other = World(), World()
    world.stages.nbytes = 2 * LENGTH
    transfer = world.transfer(range(6))
    failing: Any = SimpleNamespace(reach=Failing(other.reach, good, UnavailableError("gone")))
    transfer.leases = [Lease(failing, 2), *transfer.leases]
    transfer.pieces = [(i, LENGTH, ((0, i * LENGTH), (1, i * LENGTH))) for i in range(6)]
    filled: list[int] = []

    def counted(index: int, payload: Payload) -> None:
        filled.append(index)
        fill(index, payload)

    transfer.write(FRAMER, world.stages, counted)
    assert filled == list(range(6))
    assert (transfer.done, transfer.written.get(0, []), transfer.written[1]) == (6, list(range(2 * good)), list(range(6)))
    sink = Sink()
    world.transfer(range(6)).read(FRAMER, world.stages, sink)
    assert sink == list(range(6))


def test_write_asks_for_no_more_blocks_when_their_only_place_has_failed() -> None:
    """Bytes that have nowhere to go are not computed; a lease that was lost is written to no more."""
    world = World()
    world.stages.nbytes = 2 * LENGTH
    transfer = world.transfer(range(6))
    filled: list[int] = []

    def lost(index: int, payload: Payload) -> None:
        filled.append(index)
        if index == 3:
            transfer.lost.add(0)

    transfer.write(FRAMER, world.stages, lost)
    assert filled == [0, 1, 2, 3]
    assert (transfer.written, transfer.done) == ({0: [0, 1]}, 2)


def test_only_bytes_with_another_source_are_hurried() -> None:
    """A slow node is given up early where there is a choice, and waited for to the deadline where there is none."""
    world = World().written()
    world.reach = reach = Failing(world.reach, 9, UnavailableError("gone"))
    patient, hurried = world.transfer(range(6)), world.transfer(range(6))
    hurried.hurried = {0}
    for transfer in (patient, hurried):
        transfer.read(FRAMER, world.stages, Sink())
        assert transfer.done == 6
    assert reach.deadlines_ns[0] == patient.deadline_ns
    assert reach.deadlines_ns[1] < hurried.deadline_ns


def test_stages_are_reused_and_bounded() -> None:
    """Touching fresh pages costs more than the copy: buffers come back, but not without end."""
    stages = Stages(LENGTH, keep=1)
    with stages.take() as a, stages.take() as b:
        assert a is not b
        assert a.nbytes == b.nbytes == WINDOW_BYTES
    with stages.take() as again:
        assert again is b or again is a
        with stages.take() as fresh:
            assert fresh is not again
    assert Stages(WINDOW_BYTES + 1).nbytes == WINDOW_BYTES + 1
