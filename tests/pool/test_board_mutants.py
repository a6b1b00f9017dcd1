"""The tests of the board machine: defects of the core made on purpose, each of which it must notice."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvpool.block import BlockKey
from kvpool.pool.blocks import Blocks
from kvpool.pool.fences import Fences
from kvpool.pool.leases import Lease
from kvpool.pool.resident import Resident
from kvpool.pool.slabs import Slabs
from kvpool.pool.steps import Steps
from kvpool.pool.values import Move
from kvpool.testing.board_twin import BoardTwin
from kvpool.testing.sim.mutants import carved_bytes_lost
from tests.pool.test_board_machine import BoardMachine

Patch = tuple[Any, str, Any]


def _holds_ignored() -> Sequence[Patch]:
    withdraw = BoardTwin.withdraw

    def blind(self: BoardTwin, keys: Sequence[BlockKey]) -> set[BlockKey]:
        withdraw(self, keys)
        return set()

    return [(BoardTwin, "held", lambda self, key: False), (BoardTwin, "withdraw", blind)]


def _late_holds_ignored() -> Sequence[Patch]:
    recalled = Blocks._recalled

    def early(self: Blocks, blocks: Sequence[Resident]) -> set[BlockKey]:
        assert self.board is not None
        held = {block.key for block in blocks if self.board.held(block.key)}
        recalled(self, blocks)
        return held

    return [(Blocks, "_recalled", early)]


def _published_before_moved() -> Sequence[Patch]:
    relocate = Blocks.relocate

    def hasty(self: Blocks, moves: Sequence[Move]) -> bool:
        done = relocate(self, moves)
        self.moved()
        return done

    return [(Blocks, "relocate", hasty)]


def _moved_while_announced() -> Sequence[Patch]:
    return [(Blocks, "_recall", lambda self, blocks: True)]


def _published_anew_after_a_plan_was_dropped() -> Sequence[Patch]:
    def forgetful(self: Blocks, blocks: Sequence[Resident]) -> bool:
        fresh = [block for block in blocks if block.key not in self.moving]
        if self._recalled(fresh):
            return False
        self.moving.update((block.key, block) for block in fresh)
        return True

    return [(Blocks, "_recall", forgetful)]


def _never_withdrawn() -> Sequence[Patch]:
    def seen(self: Blocks, blocks: Sequence[Resident]) -> set[BlockKey]:
        return {block.key for block in blocks if self.held(block)}

    return [(Blocks, "_recalled", seen)]


def _doomed_with_its_last_lease() -> Sequence[Patch]:
    loosen = Blocks.loosen

    def blind(self: Blocks, block: Resident) -> bool:
        board, self.board = self.board, None
        try:
            return loosen(self, block)
        finally:
            self.board = board

    return [(Blocks, "loosen", blind)]


def _held_for_ever() -> Sequence[Patch]:
    return [(Blocks, "drain_lingering", lambda self, most: None)]


def _slab_movable() -> Sequence[Patch]:
    return [(Slabs, "extents", lambda self: {})]


def _no_fence() -> Sequence[Patch]:
    def add(self: Fences, offset: int, now_ns: int) -> None:
        self._queue.append((now_ns, offset))

    return [(Fences, "add", add)]


def _slab_not_fenced() -> Sequence[Patch]:
    def fence(self: Steps, lease: Lease) -> None:
        for block in lease.held():
            self._blocks.fence(block)
            self._fences.add(block.location.offset, self._now_ns)
        if lease.slab is not None:
            self._blocks.slabs.give_back(lease.slab.offset)

    return [(Steps, "_fence", fence)]


def _released_is_fenced() -> Sequence[Patch]:
    return [(Steps, "_give_back", lambda self, lease: self._fence(lease))]


def _touch_counts_misses() -> Sequence[Patch]:
    def known(self: Steps, keys: Sequence[BlockKey]) -> Iterator[Resident]:
        return iter([self._blocks.committed[key] for key in keys if key in self._blocks.committed][:1])

    return [(Steps, "_known", known)]


MUTANTS = (
    _holds_ignored, _late_holds_ignored, _published_before_moved, _moved_while_announced, _published_anew_after_a_plan_was_dropped,
    _never_withdrawn, _doomed_with_its_last_lease, _held_for_ever, carved_bytes_lost, _slab_movable, _no_fence, _slab_not_fenced,
    _released_is_fenced, _touch_counts_misses,
)  # fmt: skip


@pytest.mark.parametrize("patches", MUTANTS, ids=lambda patches: patches.__name__.strip("_"))
def test_board_machine_notices(patches: Callable[[], Sequence[Patch]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that misses a defect is no proof."""
    for target, name, value in patches():
        monkeypatch.setattr(target, name, value)
    hunt = settings(
        max_examples=1500, stateful_step_count=40, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    with pytest.raises(Exception) as caught:  # noqa: PT011 - a defect may show as anything
        run_state_machine_as_test(BoardMachine, settings=hunt)
    assert caught.value is not None
