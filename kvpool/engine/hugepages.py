"""Large pages under memory that every pass reads from end to end.

Theory. A pass of few tokens reads all weights once: half a gigabyte for SmolLM2, and an address to translate for every 4 KiB of it. Under
pages of 2 MiB the same pass of 8 tokens takes about a seventh less. The kernel makes them at once of memory that is in use already
(`MADV_COLLAPSE`, Linux 6.1); an older one does it by and by, and where they are switched off nothing changes but the speed.
"""

import ctypes
from collections.abc import Iterable
from typing import NamedTuple

from kvpool.units import KIB, MIB

_PAGE = 2 * MIB
_GAP = 64 * KIB
"""What lies closer together than this is treated as one piece: an allocator's own notes lie between."""
_HUGEPAGE, _COLLAPSE = 14, 25
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Span(NamedTuple):
    """Addresses from `start` to before `end`."""

    start: int
    end: int


def joined(spans: Iterable[Span]) -> list[Span]:
    """`spans` in order, neighbours as one."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.start - found[-1].end <= _GAP:
            found[-1] = Span(found[-1].start, max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def enlarge(spans: Iterable[Span]) -> int:
    """Ask for large pages under memory of this process that stays where it is; bytes that have them now."""
    done = 0
    for span in joined(spans):
        start, end = -(-span.start // _PAGE) * _PAGE, span.end // _PAGE * _PAGE
        if start < end and _libc.madvise(start, end - start, _HUGEPAGE) == 0 and _libc.madvise(start, end - start, _COLLAPSE) == 0:
            done += end - start
    return done
