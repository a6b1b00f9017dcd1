"""Holds and touches: the owner sees what readers hold and use, and no cell can hurt it."""

import fcntl
import mmap
import os
import random
import threading
import warnings

import numpy as np
import pytest

from kvpool.errors import ConfigError
from kvpool.testing.tier_kit import key_of
from kvpool.tier.board import Board, BoardReader, Cell
from kvpool.tier.board.cell import ACTIVE_WORD, HEAD_WORD, CellShape
from kvpool.tier.board.sealed import make_memory
from tests.tier.board.conftest import NODE, NOW, World, crafted

KEYS = [key_of(number) for number in range(24)]
SMALL = CellShape(holds=16, counters=1024, touches=8)


def fill(board: Board, count: int = 24) -> None:
    """Publish the first keys."""
    for number, key in enumerate(KEYS[:count]):
        assert board.publish(key, 64 * number, 64)


def raw_cell(shape: CellShape = SMALL, *, nbytes: int | None = None, header: bytes | None = None) -> tuple[int, memoryview]:
    """A cell whose words a test may write as it likes."""
    descriptor, mapping = make_memory("test-cell", shape.nbytes if nbytes is None else nbytes, only_writer=False)
    head = shape.encode() if header is None else header
    mapping[: len(head)] = head
    return descriptor, memoryview(mapping).cast("Q")


def test_held_block_is_seen_until_it_is_released(world: World) -> None:
    """While it is published, and after its withdrawal, too: then its bytes must stay."""
    fill(world.board)
    found = world.reader.find(KEYS[:4], NOW)
    assert not world.board.held(KEYS[0])
    hold = world.reader.hold(found, 3)
    assert hold is not None
    assert [world.board.held(key) for key in KEYS[:5]] == [True] * 3 + [False] * 2
    assert [world.board.withdraw(key) for key in KEYS[:5]] == [True] * 3 + [False] * 2
    assert (world.board.held(KEYS[1]), world.board.holding(), world.cell.active) == (True, 3, 3)
    assert not world.reader.find(KEYS[:5], NOW).present.any()
    hold.release()
    hold.release()
    assert [world.board.held(key) for key in KEYS[:5]] == [False] * 5
    assert (world.board.holding(), world.cell.active) == (0, 0)


def test_hold_is_a_context_manager(world: World) -> None:
    """The usual way to use one."""
    fill(world.board)
    hold = world.reader.hold(world.reader.find(KEYS[:2], NOW), 2)
    assert hold is not None
    with hold:
        assert world.board.held(KEYS[1])
    assert not world.board.held(KEYS[1])


def test_same_block_held_twice_is_held_until_both_are_gone(world: World) -> None:
    """By two threads, or twice in one look."""
    fill(world.board)
    first = world.reader.hold(world.reader.find([KEYS[0], KEYS[0], KEYS[1]], NOW), 3)
    second = world.reader.hold(world.reader.find([KEYS[0]], NOW), 1)
    assert first is not None
    assert second is not None
    assert world.board.holding() == 4
    first.release()
    assert (world.board.held(KEYS[0]), world.board.held(KEYS[1])) == (True, False)
    second.release()
    assert not world.board.held(KEYS[0])


def test_hold_of_a_block_that_changed_is_none_and_holds_nothing(world: World) -> None:
    """The reader came too late; the owner may give the bytes away."""
    fill(world.board)
    found = world.reader.find(KEYS[:3], NOW)
    world.board.withdraw(KEYS[2])
    assert world.reader.hold(found, 3) is None
    assert world.board.holding() == 0
    hold = world.reader.hold(found, 2)
    assert hold is not None
    hold.release()


def test_hold_of_more_than_is_present_or_fits_is_none(world: World) -> None:
    """All or nothing; what is held already stays so."""
    fill(world.board)
    found = world.reader.find([*KEYS[:20], key_of(99)], NOW)
    assert world.reader.hold(found, 21) is None
    assert world.reader.hold(found, 17) is None
    first = world.reader.hold(found, 16)
    assert first is not None
    assert world.reader.hold(found, 1) is None
    assert world.board.holding() == 16
    first.release()
    again = world.reader.hold(found, 1)
    assert again is not None
    again.release()


def test_slot_of_a_doomed_block_is_not_given_out_until_it_is_let_go(world: World) -> None:
    """A hold names a slot: another block there would look held, and the old one not."""
    keys = [crafted(7, 3, 4, number) for number in range(9)]
    assert all(world.board.publish(key, 0, 64) for key in keys[:8])
    hold = world.reader.hold(world.reader.find(keys[:1], NOW), 1)
    assert hold is not None
    assert world.board.withdraw(keys[0])
    assert not world.board.publish(keys[8], 0, 64)
    hold.release()
    assert world.board.publish(keys[8], 0, 64)
    assert not world.board.held(keys[0])
    assert world.reader.find(keys[1:], NOW).present.all()


def test_key_published_again_is_held_while_its_old_bytes_are(world: World) -> None:
    """A move that was given up puts the same bytes on the board a second time: who holds them holds the first record."""
    fill(world.board, 1)
    hold = world.reader.hold(world.reader.find(KEYS[:1], NOW), 1)
    assert hold is not None
    assert world.board.withdraw(KEYS[0])
    assert world.board.publish(KEYS[0], 0, 64)
    assert world.board.held(KEYS[0])
    assert world.board.withdraw(KEYS[0])
    assert world.board.held(KEYS[0])
    hold.release()
    assert not world.board.held(KEYS[0])
    assert world.board.publish(KEYS[0], 0, 64)
    assert not world.board.withdraw(KEYS[0])


def test_holds_of_a_detached_cell_are_gone(world: World) -> None:
    """Its process is dead; nobody else can release them."""
    fill(world.board)
    hold = world.reader.hold(world.reader.find(KEYS[:2], NOW), 2)
    assert hold is not None
    assert world.board.withdraw(KEYS[0])
    world.board.detach(world.number)
    world.board.detach(world.number)
    assert [world.board.held(key) for key in KEYS[:2]] == [False, False]
    assert world.board.holding() == 0
    hold.release()


def test_each_of_several_cells_counts(world: World) -> None:
    """One process letting go says nothing about another."""
    fill(world.board)
    other = Cell.create(holds=4, touches=4)
    number = world.board.attach(other.fd)
    os.close(os.dup(other.fd))
    there = BoardReader(world.board.read_fd, other, NODE, 7)
    first, second = world.reader.hold(world.reader.find(KEYS[:1], NOW), 1), there.hold(there.find(KEYS[:1], NOW), 1)
    assert first is not None
    assert second is not None
    first.release()
    assert world.board.held(KEYS[0])
    second.release()
    assert not world.board.held(KEYS[0])
    there.touch(there.find(KEYS[:1], NOW), 1)
    world.reader.touch(world.reader.find(KEYS[1:2], NOW), 1)
    assert sorted(world.board.touched(9)) == sorted(KEYS[:2])
    world.board.detach(number)
    other.close()


def test_threads_that_hold_and_release_leave_nothing_behind(world: World) -> None:
    """Counts of one cell are changed by all threads of its process."""
    fill(world.board)
    wrong: list[str] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(300):
            keys = chance.sample(KEYS, 4)
            hold = world.reader.hold(world.reader.find(keys, NOW), 4)
            if hold is not None:
                if not all(world.cell._counters[slot] for slot in world.reader.find(keys, NOW).slots.tolist()):
                    wrong.append("a held block isn't counted")
                hold.release()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert (world.cell.active, int(world.cell._counters.sum()), world.board.holding()) == (0, 0, 0)


def test_hold_may_end_in_the_midst_of_another_call_of_its_thread(world: World) -> None:
    """A view that is part of a cycle ends when the collector pleases, and since Python 3.12 that is between any two steps of a thread."""
    fill(world.board)
    found = world.reader.find(KEYS, NOW)
    hold = world.reader.hold(found, 2)
    assert hold is not None

    def collected() -> None:
        with world.cell._lock:
            hold.release()

    thread = threading.Thread(target=collected, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert (world.cell.active, int(world.cell._counters.sum())) == (0, 0)


def test_forked_child_changes_nothing_of_its_parents_cell(world: World) -> None:
    """Views that end in the child, at its exit for example, must not end the parent's holds."""
    fill(world.board)
    found, place = world.reader.find(KEYS[:2], NOW), world.reader.find_one(KEYS[0], NOW)
    assert place is not None
    hold = world.reader.hold(found, 1)
    assert hold is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        hold.release()
        world.reader.touch(found, 2)
        world.reader.touch_one(place)
        os._exit(3 if world.reader.hold(found, 2) is None else 4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert [world.board.held(key) for key in KEYS[:2]] == [True, False]
    assert world.board.touched(9) == []
    hold.release()
    assert not world.board.held(KEYS[0])


def test_touches_arrive_in_order_once_and_only_for_what_is_still_there(world: World) -> None:
    """A use of something that has left is no use of what took its place."""
    fill(world.board)
    world.reader.touch(world.reader.find([*KEYS[:3], key_of(99)], NOW), 4)
    place = world.reader.find_one(KEYS[3], NOW)
    assert place is not None
    world.reader.touch_one(place)
    assert world.board.touched(0) == []
    assert world.board.touched(2) == KEYS[:2]
    world.board.withdraw(KEYS[2])
    world.board.publish(KEYS[2], 0, 64)
    assert world.board.touched(9) == [KEYS[3]]
    assert world.board.touched(9) == []
    assert (world.board.counters["touches"], world.board.counters["touches_lost"]) == (3, 0)


@pytest.mark.parametrize("batches", [[20], [3, 3, 3, 3], [8, 1], [5, 8], [7, 24]])
def test_ring_that_ran_over_keeps_the_newest_and_counts_the_rest(world: World, batches: list[int]) -> None:
    """A reader never waits for the owner."""
    fill(world.board)
    found = world.reader.find(KEYS, NOW)
    used = [key for count in batches for key in KEYS[:count]]
    for count in batches:
        world.reader.touch(found, count)
    assert world.board.touched(100) == used[-8:]
    assert world.board.counters["touches_lost"] == len(used) - 8
    world.reader.touch(found, 1)
    assert world.board.touched(100) == KEYS[:1]


def test_touches_of_all_cells_get_their_turn(world: World) -> None:
    """A busy reader doesn't keep the owner from hearing of the others."""
    fill(world.board)
    other = Cell.create(holds=4, touches=8)
    world.board.attach(other.fd)
    there = BoardReader(world.board.read_fd, other, NODE, 7)
    there.touch(there.find(KEYS[8:10], NOW), 2)
    heard = []
    for _ in range(3):
        world.reader.touch(world.reader.find(KEYS[:2], NOW), 2)
        heard += world.board.touched(2)
    assert set(KEYS[8:10]) < set(heard)
    other.close()


@pytest.mark.parametrize("seed", range(8))
def test_cell_of_garbage_neither_breaks_nor_blocks_the_owner(world: World, seed: int) -> None:
    """Random bytes behind the header: holds that can't be are nobody's; touched are blocks of the board, one ring of them at most."""
    fill(world.board)
    descriptor, words = raw_cell()
    world.board.attach(descriptor)
    chance = np.random.default_rng(seed)
    for _ in range(50):
        words[ACTIVE_WORD:] = memoryview(chance.bytes(SMALL.nbytes - 8 * ACTIVE_WORD)).cast("Q")
        assert not any(world.board.held(key) for key in KEYS)
        assert world.board.holding() == 0
        touched = world.board.touched(1000)
        assert len(touched) <= SMALL.touches
        assert set(touched) <= set(KEYS)
        assert not world.board.withdraw(KEYS[3])
        assert world.board.publish(KEYS[3], 0, 64)
    assert world.board.counters["touches_lost"] >= SMALL.touches
    assert world.board.counters["broken_cells"] == 1
    os.close(descriptor)


@pytest.mark.parametrize("head", [1 << 63, (1 << 64) - 1, 1 << 41])
def test_ring_whose_head_jumped_is_taken_up_again_at_its_head(world: World, head: int) -> None:
    """Counted as one ring lost, and what comes after is heard."""
    fill(world.board)
    descriptor, words = raw_cell()
    world.board.attach(descriptor)
    found = world.reader.find(KEYS[:1], NOW)
    words[HEAD_WORD] = head
    assert world.board.touched(9) == []
    assert world.board.counters["touches_lost"] == SMALL.touches
    words[SMALL.ring_at // 8 + head % SMALL.touches] = int(found.slots[0]) | int(found.generations[0]) << 32
    words[HEAD_WORD] = (head + 1) % (1 << 64)
    assert world.board.touched(9) == KEYS[:1]
    os.close(descriptor)


def test_touch_of_a_slot_that_is_none_is_dropped(world: World) -> None:
    """Numbers past the board, records never used, blocks in flux."""
    fill(world.board, 1)
    descriptor, words = raw_cell()
    world.board.attach(descriptor)
    slot = int(world.reader.find(KEYS[:1], NOW).slots[0])
    unused = (slot + 1) % world.board.shape.slots
    world.board.withdraw(KEYS[0])
    for number, entry in enumerate((0xFFFF_FFFF, world.board.shape.slots, unused, slot | 3 << 32, slot | 2 << 32)):
        words[SMALL.ring_at // 8 + number] = entry
    words[HEAD_WORD] = 5
    assert world.board.touched(9) == []
    os.close(descriptor)


def test_what_is_no_cell_or_could_be_truncated_is_refused(world: World) -> None:
    """The owner reads from it for as long as its process lives: a page that went would be a SIGBUS."""
    plain = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.write(plain, SMALL.encode())
    os.ftruncate(plain, SMALL.nbytes)
    unsealable = os.open("/dev/null", os.O_RDONLY)
    for descriptor, why in (
        (plain, "not sealed"),
        (unsealable, "no sealed memory"),
        (world.board.read_fd, "magic"),
        (10**6, "no sealed memory"),
    ):
        with pytest.raises(ConfigError, match=why):
            world.board.attach(descriptor)
    fcntl.fcntl(plain, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    assert world.board.attach(plain) > world.number
    os.close(plain)
    os.close(unsealable)


@pytest.mark.parametrize(
    "shape",
    [
        CellShape(0, 1024, 8),
        CellShape(1 << 16, 1024, 8),
        CellShape(16, 1000, 8),
        CellShape(16, 0, 8),
        CellShape(16, 1 << 40, 8),
        CellShape(16, 1024, 0),
        CellShape(16, 1024, 12),
        CellShape(16, 1024, 1 << 30),
    ],
)
def test_cell_of_a_shape_that_can_not_be_is_refused(world: World, shape: CellShape) -> None:
    """Sizes are what all later bounds rest on."""
    descriptor, _ = raw_cell(nbytes=max(8192, shape.nbytes if shape.nbytes < 1 << 24 else 0), header=shape.encode())
    with pytest.raises(ConfigError, match="can't be so"):
        world.board.attach(descriptor)
    os.close(descriptor)


def test_cell_of_another_format_or_size_is_refused(world: World) -> None:
    """Neither more nor less than its header says."""
    for nbytes in (SMALL.nbytes - 4096, SMALL.nbytes + 4096):
        descriptor, _ = raw_cell(nbytes=nbytes)
        with pytest.raises(ConfigError, match="can't be so"):
            world.board.attach(descriptor)
        os.close(descriptor)
    descriptor, words = raw_cell()
    words[1] = 2
    with pytest.raises(ConfigError, match="format 2"):
        world.board.attach(descriptor)
    os.close(descriptor)


def test_cells_are_bounded_in_number(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs the owner a look."""
    monkeypatch.setattr("kvpool.tier.board.cells.MAX_CELLS", 1)
    with pytest.raises(ConfigError, match="read this board already"):
        world.board.attach(world.cell.fd)
    world.board.detach(world.number)
    assert world.board.attach(world.cell.fd) > world.number


def test_owner_can_not_write_a_cell_and_a_closed_cell_holds_nothing_new(world: World) -> None:
    """Each side writes its own memory only."""
    fill(world.board)
    with pytest.raises(PermissionError):
        mmap.mmap(world.cell.fd, world.cell.shape.nbytes)
    found = world.reader.find(KEYS[:2], NOW)
    hold = world.reader.hold(found, 1)
    assert hold is not None
    world.cell.close()
    world.cell.close()
    assert world.reader.hold(found, 1) is None
    assert world.board.held(KEYS[0])
    hold.release()
    assert not world.board.held(KEYS[0])
