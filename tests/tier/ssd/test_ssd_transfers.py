"""Many transfers at once: by the kernel, by threads, or one after the other; all keep the same promises."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import xxhash

from kvpool.clock import MonotonicClock
from kvpool.testing.kill_ssd import data_of, key_of, record_of
from kvpool.testing.sim.disk import SimDisk
from kvpool.tier.ssd import PAGE, Disk, FileDisk, Piece, SsdTier, append, file_disk
from kvpool.tier.ssd.aio import KernelTransfers
from kvpool.tier.ssd.disk import Transfers
from kvpool.tier.ssd.format import Group, encode_group
from kvpool.tier.ssd.lanes import staging
from kvpool.tier.ssd.pooled import PooledTransfers
from kvpool.tier.ssd.reader import Fetched, Reader, Wanted
from kvpool.units import KIB

DEPTH = 4
FILE = "file"


def refuse(*_: object) -> KernelTransfers:
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


@pytest.fixture(params=["kernel", "threads", "simulated"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    if request.param == "simulated":
        yield SimDisk(1 << 24, Random(1))
        return
    if request.param == "threads":
        monkeypatch.setattr(file_disk, "KernelTransfers", refuse)
    made = FileDisk(tmp_path)
    if not made.direct and request.param == "kernel":
        pytest.skip("no O_DIRECT here")
    yield made
    made.close()


def all_of(transfers: Transfers, count: int) -> dict[int, int]:
    """What became of `count` transfers."""
    ended: dict[int, int] = {}
    while len(ended) < count:
        ended.update(transfers.ended(wait=True))
    return ended


def test_transfers_written_at_once_are_read_back(disk: Disk) -> None:
    """Each piece goes to its place and each tag comes back once, whatever the order."""
    disk.create(FILE, 16 * PAGE)
    transfers, stages = disk.transfers(DEPTH), staging(2 * DEPTH, 2 * PAGE)
    assert transfers.ended(wait=True) == []  # nothing is under way
    for tag in range(DEPTH):
        stages[tag][:] = 10 + tag
        transfers.start(tag, Piece(FILE, (3 - tag) * 2 * PAGE, stages[tag]), writing=True)
    assert all_of(transfers, DEPTH) == dict.fromkeys(range(DEPTH), 0)
    assert disk.sync(FILE) == 0
    for tag in range(DEPTH):
        transfers.start(tag, Piece(FILE, (3 - tag) * 2 * PAGE, stages[DEPTH + tag]), writing=False)
    assert all_of(transfers, DEPTH) == dict.fromkeys(range(DEPTH), 0)
    assert [set(stage.tolist()) for stage in stages[DEPTH:]] == [{10}, {11}, {12}, {13}]
    assert transfers.ended(wait=False) == []
    transfers.close()


def test_transfers_that_fail_are_errnos_beside_those_that_succeed(disk: Disk) -> None:
    """A missing file and the end of a file spoil no other transfer."""
    disk.create(FILE, 3 * PAGE)
    transfers, stages = disk.transfers(DEPTH), staging(DEPTH, 2 * PAGE)
    transfers.start(0, Piece("absent", 0, stages[0]), writing=False)
    transfers.start(1, Piece(FILE, 2 * PAGE, stages[1]), writing=False)
    transfers.start(2, Piece(FILE, PAGE, stages[2]), writing=False)
    transfers.start(3, Piece("absent", 0, stages[3]), writing=True)
    assert all_of(transfers, DEPTH) == {0: errno.ENOENT, 1: errno.ENODATA, 2: 0, 3: errno.ENOENT}
    transfers.close()


def test_threads_instead_of_the_kernel_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where the kernel refuses, the tier works, and its books and its log say which way it goes."""
    monkeypatch.setattr(file_disk, "KernelTransfers", refuse)
    tier = SsdTier.open(tmp_path, capacity_bytes=1 << 20, segment_bytes=256 * KIB, incarnation=1, lanes=2)
    assert tier.put([record_of(n) for n in range(3)], 1 << 62) == [True] * 3
    buffer = np.zeros(data_of(1).size, np.uint8)
    assert tier.get([(key_of(1), buffer)], 1 << 62) == [True]
    assert np.array_equal(buffer, data_of(1))
    assert tier.books().counters["threaded_io"] == 1
    assert not tier.direct or caplog.text.count("threads carry them out") == 1
    tier.close()


@pytest.mark.parametrize("make", [PooledTransfers])
def test_threads_do_not_wait_for_one_another(make: Callable[..., PooledTransfers]) -> None:
    """Depth is real: a transfer that hangs holds up no other."""
    gate = threading.Event()
    transfers = make(2, lambda piece, writing: 0 if piece.offset or gate.wait(10) else errno.EIO)
    page = np.zeros(PAGE, np.uint8)
    transfers.start(7, Piece(FILE, 0, page), writing=True)
    transfers.start(8, Piece(FILE, PAGE, page), writing=True)
    assert transfers.ended(wait=True) == [(8, 0)]
    gate.set()
    assert transfers.ended(wait=True) == [(7, 0)]
    transfers.close()


def test_kernel_gives_up_nothing_half_done(tmp_path: Path) -> None:
    """A transfer the kernel ended early is carried out again in whole."""
    disk = FileDisk(tmp_path)
    if not disk.direct:
        pytest.skip("no O_DIRECT here")
    disk.create(FILE, 3 * PAGE)
    again: list[Piece] = []

    def redo(piece: Piece, writing: bool) -> int:
        assert not writing
        again.append(piece)
        return 5

    transfers = KernelTransfers(disk._handles, 1, redo)
    piece = Piece(FILE, 2 * PAGE, staging(1, 2 * PAGE)[0])
    transfers.start(0, piece, writing=False)  # one of its two pages lies behind the end
    assert transfers.ended(wait=True) == [(0, 5)]
    assert again == [piece]
    transfers.close()
    disk.close()


def test_more_readers_than_places_all_get_their_bytes(tmp_path: Path) -> None:
    """Readers take turns at the few ways to the disk, and nobody waits in a circle."""
    tier = SsdTier.open(tmp_path, capacity_bytes=4 << 20, segment_bytes=1 << 20, incarnation=1, lanes=2)
    assert all(tier.put([record_of(n) for n in range(20)], 1 << 62))
    failures: list[int] = []

    def read(seed: int) -> None:
        rng = Random(seed)
        for _ in range(10):
            numbers = rng.sample(range(20), 6)
            buffers = [np.zeros(data_of(n).size, np.uint8) for n in numbers]
            answers = tier.get([(key_of(n), into) for n, into in zip(numbers, buffers, strict=True)], 1 << 62)
            failures.extend(
                n for n, into, ok in zip(numbers, buffers, answers, strict=True) if not ok or not np.array_equal(into, data_of(n))
            )

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert len(tier._reader._idle) <= 4
    tier.close()


@pytest.mark.parametrize("offset", [0, 64, PAGE, 3 * PAGE + 192])
@pytest.mark.parametrize("length", [1, PAGE, PAGE + 5, 600 * KIB + 3])
def test_records_of_any_size_at_any_place_are_read_whole(tmp_path: Path, length: int, offset: int) -> None:
    """Into memory that begins at a page, into memory that does not, and only to be checked: same bytes, nothing beside them."""
    disk = FileDisk(tmp_path)
    size = 1 << 20
    disk.create("segment-00000", size)
    image = staging(1, size)[0]
    image[:] = np.frombuffer(Random(3).randbytes(size), np.uint8)
    assert disk.write([Piece("segment-00000", 0, image)]) == [0]
    reader = Reader(disk, 3, MonotonicClock())
    for shift in (0, 64):
        around = staging(1, size)[0]
        into = around[shift : shift + length]
        got = reader.fetch([Wanted(0, offset, length, into), Wanted(0, offset, length, None), Wanted(9, 0, 1, None)], 1 << 62)
        checksum = xxhash.xxh3_64_intdigest(image[offset : offset + length].tobytes())
        assert got == [Fetched(0, checksum), Fetched(0, checksum), Fetched(errno.ENOENT)]
        assert np.array_equal(into, image[offset : offset + length])
        assert not around[shift + length :].any()
    assert reader.fetch([Wanted(0, 0, 1, None)], 0) == [Fetched(errno.ETIMEDOUT)]
    reader.close()
    disk.close()


def test_call_that_raises_leaves_nothing_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records' memory is the caller's again, and the room of what it began is written by the next call only."""
    monkeypatch.setattr(append, "GROUP_BYTES", 32 * KIB)
    tier = SsdTier.open(tmp_path, capacity_bytes=8 << 20, segment_bytes=1 << 20, incarnation=1, lanes=4)
    under_way = tier._writer._appender._under_way

    def broken(group: Group) -> bytes:
        assert under_way  # the next group has begun
        raise MemoryError

    monkeypatch.setattr(append, "encode_group", broken)
    with pytest.raises(MemoryError):
        tier.put([record_of(n) for n in range(20)], 1 << 62)
    assert under_way == []
    monkeypatch.setattr(append, "encode_group", encode_group)
    numbers = list(range(20, 40))
    assert all(tier.put([record_of(n) for n in numbers], 1 << 62))
    assert [tier.verify(key_of(n)) for n in numbers] == [True] * 20
    assert tier.find([key_of(0)]) == [None]
    tier.close()
