"""What the owner says, readers find; what it takes back, they don't."""

import mmap
import os
import random

import numpy as np
import pytest

from kvpool.errors import ClosedError, ConfigError, FrameError, UnavailableError
from kvpool.testing.tier_kit import key_of
from kvpool.tier.board import Board, BoardReader, Cell, Flag
from tests.tier.board.conftest import NODE, NOW, World, crafted


def test_published_block_is_found_and_withdrawn_one_is_not(world: World) -> None:
    """By both ways of looking, with all that was said of it."""
    board, reader, keys = world.board, world.reader, [key_of(n) for n in range(20)]
    for number, key in enumerate(keys[:10]):
        assert board.publish(key, 64 * number, 100 + number, flags=Flag.UNVERIFIED if number % 2 else 0)
    found = reader.find(keys, NOW)
    assert found.present.tolist() == [True] * 10 + [False] * 10
    assert found.offsets[:10].tolist() == [64 * n for n in range(10)]
    assert found.lengths[:10].tolist() == [100 + n for n in range(10)]
    assert found.flags[:10].tolist() == [n % 2 for n in range(10)]
    assert (found.leading(), len(found), len(board)) == (10, 20, 10)
    for index, key in enumerate(keys[:10]):
        place = reader.find_one(key, NOW)
        assert place == (found.slots[index], found.generations[index], 64 * index, 100 + index, index % 2)
    assert [board.withdraw(key) for key in keys[:12]] == [False] * 12
    assert not reader.find(b"".join(keys), NOW).present.any()
    assert [reader.find_one(key, NOW) for key in keys] == [None] * 20


def test_find_of_nothing_finds_nothing(world: World) -> None:
    """No keys are no error, and all of none is unchanged."""
    found = world.reader.find([], NOW)
    assert (len(found), found.leading(), world.reader.unchanged(found, 0, 0)) == (0, 0, True)
    assert world.reader.hold(found, 0) is None


def test_find_agrees_with_a_dict_through_random_changes(world: World) -> None:
    """Thousands of changes in a board that is often full: everything that was accepted is found where it is, nothing else is."""
    chance, model = random.Random(5), dict[int, tuple[int, int]]()
    keys = [key_of(number) for number in range(90)]
    refused = 0
    for step in range(4000):
        number = chance.randrange(90)
        if number in model and chance.random() < 0.45:
            assert not world.board.withdraw(keys[number])
            del model[number]
        elif world.board.publish(keys[number], 64 * step, step + 1):
            model[number] = (64 * step, step + 1)
        else:
            assert number not in model
            refused += 1
        if step % 40 == 0:
            found = world.reader.find(keys, NOW)
            assert {int(n) for n in np.flatnonzero(found.present)} == set(model)
            for at, where in model.items():
                place = world.reader.find_one(keys[at], NOW)
                assert (found.offsets[at], found.lengths[at]) == where
                assert place is not None
                assert (place.offset, place.length) == where
    assert refused == world.board.counters["unindexed"] > 10


def test_key_goes_to_the_emptier_of_its_buckets(world: World) -> None:
    """Two-choice hashing is what keeps buckets from running over; the first one wins a tie."""
    for number in range(3):
        world.board.publish(crafted(number + 1, 2, 2, number), 0, 64)
    key, other = crafted(9, 2, 5, 9), crafted(10, 5, 6, 10)
    world.board.publish(key, 0, 64)
    world.board.publish(other, 0, 64)
    places = [world.reader.find_one(each, NOW) for each in (key, other)]
    assert [place and place.slot // 4 for place in places] == [5, 6]


def test_key_is_found_beside_its_own_old_record_and_others_of_its_tag(world: World) -> None:
    """What a key left in a slot before must not hide where it is now, whichever of several equal lanes is looked at first."""
    keys = [crafted(7, 3, 4, number) for number in range(8)]
    chance = random.Random(3)
    for _ in range(300):
        there = chance.sample(keys, chance.randrange(9))
        for key in there:
            assert world.board.publish(key, 64, 64)
        assert {key for key, here in zip(keys, world.reader.find(keys, NOW).present, strict=True) if here} == set(there)
        for key in there:
            world.board.withdraw(key)


def test_block_whose_buckets_are_full_is_unindexed_until_one_leaves(world: World) -> None:
    """Also with one and the same tag in each lane: each of eight is told from the others by its key."""
    keys = [crafted(7, 3, 4, number) for number in range(9)]
    assert [world.board.publish(key, 64 * n, 64) for n, key in enumerate(keys)] == [True] * 8 + [False]
    assert world.board.counters["unindexed"] == 1
    found = world.reader.find(keys, NOW)
    assert found.present.tolist() == [True] * 8 + [False]
    assert found.offsets[:8].tolist() == [64 * n for n in range(8)]
    assert world.reader.unchanged(found, 0, 9)
    assert [world.reader.find_one(key, NOW) is not None for key in keys] == [True] * 8 + [False]
    assert not world.board.withdraw(keys[5])
    assert world.board.publish(keys[8], 640, 64)
    assert not world.reader.unchanged(found, 0, 9)
    assert world.reader.find(keys, NOW).present.tolist() == [True] * 5 + [False] + [True] * 3


@pytest.mark.parametrize(
    "key", [bytes(32), b"\xff" * 32, crafted(0, 1, 2, 0), crafted(1 << 15, 1, 1, 3)], ids=["zeros", "ones", "tag", "high"]
)
def test_key_of_any_words_is_found_when_it_is_there_and_only_then(world: World, key: bytes) -> None:
    """Keys with the tag of an empty slot, or with the bytes of a record never used."""
    other = crafted(0, 1, 2, 99)
    assert not world.reader.find(key, NOW).present.any()
    assert world.reader.find_one(key, NOW) is None
    assert world.reader.find_one(key, 0) is None
    world.board.publish(other, 64, 64)
    assert not world.reader.find(key, NOW).present.any()
    world.board.publish(key, 128, 64)  # type: ignore[arg-type]
    assert world.reader.find(key + other, NOW).offsets.tolist() == [128, 64]
    assert (world.reader.find_one(key, NOW) or (0, 0, 0))[2] == 128


def test_expired_block_is_not_found(world: World) -> None:
    """A reader needn't wait for the owner to notice; a block without an end never expires."""
    world.board.publish(key_of(1), 0, 64, expires_ns=NOW)
    world.board.publish(key_of(2), 0, 64)
    keys = [key_of(1), key_of(2)]
    assert world.reader.find(keys, NOW - 1).present.tolist() == [True, True]
    assert world.reader.find(keys, NOW).present.tolist() == [False, True]
    assert world.reader.find_one(key_of(1), NOW - 1) is not None
    assert world.reader.find_one(key_of(1), NOW) is None
    assert world.reader.find(keys, (1 << 63) - 1).present.tolist() == [False, True]


def test_flag_is_cleared_without_a_change(world: World) -> None:
    """Checking a block is no reason for readers to read it again."""
    world.board.publish(key_of(1), 64, 99, flags=Flag.UNVERIFIED)
    before = world.reader.find([key_of(1)], NOW)
    world.board.verified(key_of(1))
    world.board.verified(key_of(2))
    after = world.reader.find([key_of(1)], NOW)
    assert (before.flags.tolist(), after.flags.tolist(), after.lengths.tolist()) == ([Flag.UNVERIFIED], [0], [99])
    assert world.reader.unchanged(before, 0, 1)


@pytest.mark.parametrize("generation", [2, (1 << 32) - 2, (1 << 32), (1 << 63)])
def test_generation_of_any_size_is_told_from_the_next(world: World, generation: int) -> None:
    """It would take 300,000 years to wrap; half of it does in the ring of touches, where it costs one touch at most."""
    key = key_of(1)
    world.board.publish(key, 0, 64)
    slot = world.reader.find([key], NOW).slots[0]
    world.board._records[slot, 0] = generation
    found, place = world.reader.find([key], NOW), world.reader.find_one(key, NOW)
    assert found.present.all()
    assert place is not None
    assert place.generation == generation
    world.reader.touch(found, 1)
    assert world.board.touched(9) == [key]
    world.board.publish(key, 0, 64)
    assert not world.reader.unchanged(found, 0, 1)
    assert not world.reader.still(place)
    world.reader.touch(found, 1)
    assert world.board.touched(9) == []


def test_change_is_seen_in_the_range_where_it_was(world: World) -> None:
    """A withdrawal, and a publication in the same place; what wasn't present doesn't count."""
    keys = [key_of(n) for n in range(6)]
    for key in keys[:5]:
        world.board.publish(key, 0, 64)
    found, places = world.reader.find(keys, NOW), [world.reader.find_one(key, NOW) for key in keys[:5]]
    assert world.reader.unchanged(found, 0, 6)
    world.board.withdraw(keys[1])
    world.board.withdraw(keys[3])
    world.board.publish(keys[3], 0, 64)
    world.board.publish(keys[5], 0, 64)
    assert [world.reader.unchanged(found, n, n + 1) for n in range(6)] == [True, False, True, False, True, True]
    assert [place is not None and world.reader.still(place) for place in places] == [True, False, True, False, True]
    assert not world.reader.unchanged(found, 0, 6)
    assert world.reader.unchanged(found, 4, 6)


def test_leading_run_ends_at_the_first_that_is_not_there(world: World) -> None:
    """What a chain can be read for."""
    keys = [key_of(n) for n in range(5)]
    for number in (0, 1, 3):
        world.board.publish(keys[number], 0, 64)
    assert world.reader.find(keys, NOW).leading() == 2
    assert world.reader.find(keys[2:], NOW).leading() == 0
    assert world.reader.find(keys[:2], NOW).leading() == 2


def test_retired_board_is_empty_and_changes_all(world: World) -> None:
    """After its end the node answers for nothing: not what was found before it either."""
    keys = [key_of(1), key_of(2)]
    world.board.publish(keys[0], 0, 64)
    found, place = world.reader.find(keys, NOW), world.reader.find_one(keys[0], NOW)
    assert place is not None
    hold = world.reader.hold(found, 1)
    assert hold is not None
    read_fd = os.dup(world.board.read_fd)
    world.board.close()
    world.board.close()
    assert not world.reader.live
    assert not world.reader.find(keys, NOW).present.any()
    assert world.reader.find_one(keys[0], NOW) is None
    assert not world.reader.unchanged(found, 0, 1)
    assert not world.reader.still(place)
    assert world.reader.hold(found, 1) is None
    hold.release()
    with pytest.raises(UnavailableError, match="retired"):
        BoardReader(read_fd, None, NODE, 7)
    os.close(read_fd)


def test_closed_board_takes_nothing_more(world: World) -> None:
    """Ends are not errors, beginnings are."""
    world.board.publish(key_of(1), 0, 64)
    world.board.close()
    assert not world.board.withdraw(key_of(1))
    assert not world.board.held(key_of(1))
    assert world.board.touched(9) == []
    with pytest.raises(ClosedError):
        world.board.publish(key_of(1), 0, 64)
    with pytest.raises(ClosedError):
        world.board.attach(world.cell.fd)


def test_reader_of_another_node_or_incarnation_or_no_board_is_refused(world: World) -> None:
    """Slots of one life mean nothing in another."""
    for node, incarnation in (("cd" * 16, 7), (NODE, 8)):
        with pytest.raises(UnavailableError, match="another node or incarnation"):
            BoardReader(world.board.read_fd, None, node, incarnation)
    with pytest.raises(FrameError, match="magic"):
        BoardReader(world.cell.fd, None, NODE, 7)
    null = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(FrameError, match="not a board"):
        BoardReader(null, None, NODE, 7)
    os.close(null)


def test_board_can_not_be_written_or_truncated_by_whom_it_was_passed_to(world: World) -> None:
    """One process of the host that goes mad must not be able to send all others to wrong bytes."""
    fd, nbytes = world.board.read_fd, world.board.shape.nbytes
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 4096)
    with pytest.raises(OSError, match="Permission denied"):
        mmap.mmap(fd, nbytes)
    for size in (0, 2 * nbytes):
        with pytest.raises(OSError, match="Invalid argument"):
            os.ftruncate(fd, size)
    anew = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(anew, b"x", 4096)
    with pytest.raises(PermissionError):
        mmap.mmap(anew, nbytes)
    with pytest.raises(PermissionError):
        os.ftruncate(anew, 0)
    os.close(anew)
    with pytest.raises(TypeError, match="readonly"):
        mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)[4096] = 1


def test_reader_without_a_cell_finds_and_can_not_hold(world: World) -> None:
    """Nobody would see its holds."""
    world.board.publish(key_of(1), 0, 64)
    reader = BoardReader(world.board.read_fd, None, NODE, 7)
    found, place = reader.find([key_of(1)], NOW), reader.find_one(key_of(1), NOW)
    assert found.leading() == 1
    assert place is not None
    assert reader.hold(found, 1) is None
    reader.touch(found, 1)
    reader.touch_one(place)
    assert world.board.touched(9) == []


def test_block_longer_than_a_record_can_say_is_refused(world: World) -> None:
    """Its length would be read as flags."""
    with pytest.raises(ConfigError, match="longer"):
        world.board.publish(key_of(1), 0, 1 << 48)
    assert not world.reader.find([key_of(1)], NOW).present.any()


def test_where_memory_is_not_ordered_every_block_is_unverified(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generation alone proves nothing there, so readers must check what they copied."""
    world.board.publish(key_of(1), 0, 64)
    for module in ("found", "reader"):
        monkeypatch.setattr(f"kvpool.tier.board.{module}.UNORDERED", int(Flag.UNVERIFIED))
    place = world.reader.find_one(key_of(1), NOW)
    assert place is not None
    assert (place.flags, world.reader.find([key_of(1)], NOW).flags.tolist()) == (Flag.UNVERIFIED, [Flag.UNVERIFIED])


def test_board_that_can_not_be_had_says_so() -> None:
    """No address space for it: an error that names what was wanted."""
    with pytest.raises(ConfigError, match="bytes of shared memory"):
        Board.create(NODE, 1, max_blocks=1 << 60, capacity=1 << 62)


def test_cell_that_can_not_be_made_says_so() -> None:
    """Bounds of what one process may ask for."""
    for holds, touches in ((0, 1), (1, 0), (1 << 16, 1), (1, (1 << 20) + 1)):
        with pytest.raises(ConfigError, match="a cell takes"):
            Cell.create(holds=holds, touches=touches)
