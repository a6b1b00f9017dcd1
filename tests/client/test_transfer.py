"""The blocking half of a transfer, over the in-memory reach."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.block import BlockKey, Framer, Geometry, Namespace, chain_keys
from kvpool.client.transfer import WINDOW_BYTES, Payload, Stages, Transfer
from kvpool.errors import DeadlineError
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
        links: Any = {"n": SimpleNamespace(reach=self.reach)}
        return Transfer(
            links=links,
            leases={"n": 1},
            pieces=[(i, "n", i * LENGTH, LENGTH) for i in indices],
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
    assert (transfer.done, transfer.suspect, transfer.busy_on) == (5, {}, None)


def test_read_stops_at_a_damaged_frame_and_names_it() -> None:
    """What comes after a hole is useless; the node is told what to look at."""
    sink, world = Sink(), World().written()
    world.arena[2 * LENGTH + FRAMER.header_bytes] ^= 1
    transfer = world.transfer(range(6))
    transfer.read(FRAMER, world.stages, sink)
    assert sink == [0, 1]
    assert (transfer.done, transfer.suspect) == (2, {"n": [CHAIN[2]]})


def test_frame_of_another_block_or_another_length_is_not_delivered() -> None:
    """The bytes of some other block, though sound, are not an answer."""
    world = World().written()
    other = chain_keys(FRAMER.root, [9] * 24, 4)
    wrong_key = world.transfer(range(6), chain=other)
    wrong_key.read(FRAMER, world.stages, Sink())
    assert wrong_key.suspect == {"n": [other[0]]}
    shorter = world.transfer(range(1))
    shorter.counts = {0: 3}
    shorter.read(FRAMER, world.stages, Sink())
    assert (shorter.done, shorter.suspect) == (0, {"n": [CHAIN[0]]})


def test_stopped_or_late_transfer_ends_without_blaming_anybody() -> None:
    """A caller that went away, or a host too busy to start in time, says nothing about the node."""
    world = World().written()
    stopped, late = world.transfer(range(6)), world.transfer(range(6), within_s=-1)
    stopped.stopped.set()
    for transfer in (stopped, late):
        transfer.read(FRAMER, world.stages, Sink())
        transfer.write(FRAMER, world.stages, fill)
        assert (transfer.done, transfer.busy_on) == (0, None)


def test_failing_reach_is_named_and_what_was_done_counts() -> None:
    """The caller learns which node failed, and keeps what had arrived before."""
    world = World().written()
    whole, first = world.reach, threading.Event()

    class Failing:
        name = "memory"

        def read(self, *args: Any, **kwargs: Any) -> None:
            if first.is_set():
                raise DeadlineError("too slow")
            first.set()
            whole.read(*args, **kwargs)

    world.reach = Failing()
    world.stages.nbytes = 2 * LENGTH
    transfer, sink = world.transfer(range(6)), Sink()
    with pytest.raises(DeadlineError):
        transfer.read(FRAMER, world.stages, sink)
    assert (sink, transfer.done, transfer.busy_on) == ([0, 1], 2, "n")


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
