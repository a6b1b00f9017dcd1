"""Cutting a group into spans: every byte goes to its place once, in whole pages, whatever the lengths and the memory."""

from random import Random

import numpy as np
import pytest
import xxhash

from kvpool.clock import MonotonicClock
from kvpool.testing.sim.disk import SimDisk
from kvpool.tier.pages import Bytes
from kvpool.tier.ssd.append import _places
from kvpool.tier.ssd.disk import PAGE, Piece
from kvpool.tier.ssd.format import up
from kvpool.tier.ssd.lanes import STAGE_BYTES, Lanes, aligned
from kvpool.tier.ssd.stream import Stream, cut
from kvpool.units import KIB, MIB, SECOND


def lengths_of(rng: Random) -> list[int]:
    kinds = [
        lambda: rng.randint(1, 300),
        lambda: rng.randint(1, 64 * KIB),
        lambda: rng.randint(1, 3 * MIB),
        lambda: PAGE * rng.randint(1, 600),
    ]
    return [rng.choice(kinds)() for _ in range(rng.randint(1, 12))]


@pytest.mark.parametrize("seed", range(60))
def test_cut_covers_every_byte_once_in_whole_pages(seed: int) -> None:
    """A byte left out is a torn record, one written twice a race between two lanes."""
    rng = Random(seed)
    lengths = lengths_of(rng)
    header = rng.randint(56, 3 * PAGE)
    places, end = _places(header, lengths)
    head = up(header, PAGE)
    at = head
    covered = [max(0, min(length, head - place)) for place, length in zip(places, lengths, strict=True)]
    firsts = [0] * len(lengths)
    for span in cut(head, places, lengths):
        assert span.start == at
        assert span.start % PAGE == span.stop % PAGE == 0
        assert 0 < span.stop - span.start <= STAGE_BYTES
        at = span.stop
        inside = span.start
        for part in span.parts:
            assert part.start == covered[part.record]
            assert part.at == places[part.record] + part.start >= inside
            covered[part.record] = part.stop
            firsts[part.record] += part.first
            inside = part.at + part.stop - part.start
        assert inside <= span.stop
    assert covered == lengths
    assert at == max(head, up(end, PAGE))
    assert firsts == [place + length > head for place, length in zip(places, lengths, strict=True)]


@pytest.mark.parametrize("lanes", [0, 3])
@pytest.mark.parametrize("memory", ["pages", "odd"])
def test_stream_puts_on_the_disk_what_the_layout_says(memory: str, lanes: int) -> None:
    """From memory that begins at a page and from memory that does not, with zeros between records."""
    rng = Random(7)
    lengths = [100, 5000, 3 * MIB + 77, 64, 64, 2 * PAGE, MIB, 1]
    places, end = _places(300, lengths)
    data: list[Bytes] = []
    for length in lengths:
        space = aligned(length + 64) if memory == "pages" else aligned(length + 64)[64:]
        space[:length] = np.frombuffer(rng.randbytes(length), np.uint8)
        data.append(space[:length])
    disk = SimDisk(1 << 24, rng)
    disk.create("file", 8 * MIB)
    pool = Lanes(lanes)
    for _ in range(pool.stages):  # buffers are not clean either
        stage = pool.take(0.0)
        assert stage is not None
        stage[:] = 255
        pool.give(stage)
    head = aligned(PAGE)
    stream = Stream(disk, pool, MonotonicClock(), "file", 2 * PAGE, head, places, data)
    deadline_ns = MonotonicClock().now_ns() + 60 * SECOND
    stream.begin(deadline_ns)
    assert stream.wait() == 0
    assert stream.checksums == [xxhash.xxh3_64_intdigest(one.data) for one in data]
    expected = np.zeros(up(end, PAGE), np.uint8)
    for place, one in zip(places, data, strict=True):
        expected[place : place + one.size] = one
    assert np.array_equal(head, expected[:PAGE])
    got = aligned(expected.size - PAGE)
    assert disk.read([Piece("file", 3 * PAGE, got)]) == [0]
    assert np.array_equal(got, expected[PAGE:])
    pool.close()
