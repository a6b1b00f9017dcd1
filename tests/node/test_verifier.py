"""Blocks that nobody has checked are checked once by the node, when they turn out to be read again and again."""

import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvpool.block import BlockKey, check_frame
from kvpool.clock import MonotonicClock
from kvpool.node import verifier as module
from kvpool.node.handler import NodeHandler
from kvpool.node.tiers import Tiers
from kvpool.node.verifier import Verifier
from kvpool.policy.eviction import PrefixLru
from kvpool.pool import PoolState
from kvpool.pool.flow import FlowSettings
from kvpool.testing.board_twin import BoardTwin
from kvpool.tier import Arena
from kvpool.tier.pages import Bytes
from tests.node.conftest import SIZE, Rig, chain, until


@pytest.fixture
def board() -> BoardTwin:
    return BoardTwin()


@pytest.fixture
async def rig(tmp_path: Path, board: BoardTwin) -> AsyncIterator[Rig]:
    """A node with a board."""
    arena, clock = Arena.create(tmp_path, "0" * 32, 1, 4 * SIZE), MonotonicClock()
    state = PoolState(arena.capacity, PrefixLru(), board=board)
    tiers = Tiers(state, arena, clock, below=None, beside=None, settings=FlowSettings())
    yield Rig(state, arena, tiers, NodeHandler(state, arena, clock, node_id="0" * 32, incarnation=1, tiers=tiers), None, None)
    await tiers.stop()
    state.check()
    arena.close()


@pytest.fixture
async def verifier(rig: Rig) -> AsyncIterator[Verifier]:
    made = Verifier(rig.state, rig.arena, MonotonicClock(), rig.handler.examine)
    yield made
    await made.close()


def touch(rig: Rig, verifier: Verifier, keys: list[BlockKey]) -> None:
    """Readers of the board used these."""
    rig.state.touch(keys, 0)
    verifier.used(keys)


def paused(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, Callable[[], None]]:
    """Checks wait until they are let go on: an event that says that one has begun, and what lets it."""
    begun, going = threading.Event(), threading.Event()

    def slow(data: Bytes, key: BlockKey) -> None:
        begun.set()
        assert going.wait(20)
        check_frame(data, key)

    monkeypatch.setattr(module, "check_frame", slow)
    return begun, going.set


async def test_block_is_checked_once_it_is_used_a_second_time(rig: Rig, verifier: Verifier, board: BoardTwin) -> None:
    """What is read once and never again is its reader's to check."""
    keys = chain("a", 2)
    await rig.put(keys)
    touch(rig, verifier, keys)
    touch(rig, verifier, keys[:1])
    await until(lambda: verifier.checked == 1)
    assert [board.records[key].unverified for key in keys] == [False, True]
    touch(rig, verifier, keys)
    await until(lambda: verifier.checked == 2)
    assert not board.records[keys[1]].unverified
    assert (rig.state.books().read_leases, rig.state.counters()["hits"]) == (0, 5)


async def test_batches_are_bounded(rig: Rig, verifier: Verifier, board: BoardTwin, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is wanted, it comes piece by piece, and in the end all of it."""
    keys = chain("a", 4)
    await rig.put(keys)
    monkeypatch.setattr(module, "_BATCH_BYTES", 2 * SIZE)
    monkeypatch.setattr(module, "_PAUSE_S", 0.0)
    begun, go_on = paused(monkeypatch)
    rig.state.touch(keys, 0)
    touch(rig, verifier, keys)
    await until(begun.is_set)
    assert rig.state.books().pinned == 2 * SIZE
    go_on()
    await until(lambda: verifier.checked == 4)
    assert not any(record.unverified for record in board.records.values())


async def test_damaged_block_is_dropped(rig: Rig, verifier: Verifier, board: BoardTwin) -> None:
    """It is a miss for everybody from then on, not only for who checks it."""
    keys = chain("a", 2)
    await rig.put(keys)
    place = rig.state.locate(keys[0])
    assert place is not None
    rig.arena.view(*place)[-1] ^= 1
    rig.state.touch(keys, 0)
    touch(rig, verifier, keys)
    await until(lambda: rig.state.locate(keys[0]) is None)
    await until(lambda: verifier.checked == 1)
    assert list(board.records) == [keys[1]]
    assert rig.handler.describe().counters["corrupt"] == 1


async def amid_a_check(rig: Rig, verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> tuple[list[BlockKey], Callable[[], None]]:
    """One block whose check has begun; call what is returned with it to let the check go on."""
    keys = chain("a", 1)
    await rig.put(keys)
    begun, go_on = paused(monkeypatch)
    rig.state.touch(keys, 0)
    touch(rig, verifier, keys)
    await until(begun.is_set)
    return keys, go_on


async def test_block_that_was_replaced_meanwhile_is_not_taken_for_the_one_that_was_checked(
    rig: Rig, verifier: Verifier, board: BoardTwin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same key, other bytes: somebody found the old ones damaged and wrote them anew."""
    keys, go_on = await amid_a_check(rig, verifier, monkeypatch)
    assert rig.state.discard(keys[0])
    await rig.put(keys)
    go_on()
    await until(lambda: verifier._task is not None and verifier._task.done())
    assert board.records[keys[0]].unverified
    assert verifier.checked == 0


async def test_check_that_outlasted_its_lease_counts_for_nothing(
    rig: Rig, verifier: Verifier, board: BoardTwin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes may have been another block's for a while."""
    keys, go_on = await amid_a_check(rig, verifier, monkeypatch)
    [lease] = rig.state._leases.all()
    assert rig.state.release(lease.id, 0)
    go_on()
    await until(lambda: verifier._task is not None and verifier._task.done())
    assert board.records[keys[0]].unverified
    assert verifier.checked == 0
