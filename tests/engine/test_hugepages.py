"""Large pages change where bytes lie in memory, and nothing else."""

import mmap

import numpy as np

from kvpool.engine.hugepages import Span, enlarge, joined
from kvpool.units import KIB, MIB


def test_neighbours_are_one_piece() -> None:
    """An allocator's notes between two arrays don't part them; what is far apart stays apart, whatever the order."""
    spans = [Span(10 * MIB, 11 * MIB), Span(4 * KIB, MIB), Span(MIB + 4 * KIB, 2 * MIB)]
    assert joined(spans) == [Span(4 * KIB, 2 * MIB), Span(10 * MIB, 11 * MIB)]
    assert joined([]) == []


def test_memory_that_is_enlarged_keeps_its_bytes() -> None:
    """Whole large pages inside the span are made where the kernel does it; the bytes are the same before and after."""
    raw = mmap.mmap(-1, 9 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(raw, np.uint8)
    memory[:] = np.arange(memory.size, dtype=np.uint32).astype(np.uint8)
    start = memory.ctypes.data
    done = enlarge([Span(start, start + memory.size)])
    assert done in (0, 6 * MIB, 8 * MIB)
    assert np.array_equal(memory, np.arange(memory.size, dtype=np.uint32).astype(np.uint8))
    assert enlarge([Span(start, start + 64 * KIB)]) == 0
