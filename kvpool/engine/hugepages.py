"""Large pages under memory that every pass reads from end to end.

Theory. A pass of few tokens reads all weights once: half a gigabyte for SmolLM2, and an address to translate for every 4 KiB of it. Under
pages of 2 MiB the same pass of 8 tokens takes about a seventh less. The kernel makes them at once of memory that is in use already
(`MADV_COLLAPSE`, Linux 6.1); an older one does it by and by, and where they are switched off nothing changes but the speed.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kvpool.tier.pages import COLLAPSE, HUGE, HUGEPAGE, advise
from kvpool.units import KIB

_GAP = 64 * KIB
"""What lies closer together than this is treated as one piece: an allocator's own notes lie between."""


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
        start, end = -(-span.start // HUGE) * HUGE, span.end // HUGE * HUGE
        if start < end and not advise(start, end - start, HUGEPAGE) and not advise(start, end - start, COLLAPSE):
            done += end - start
    return done
