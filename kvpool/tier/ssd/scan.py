"""Reading a segment back: its groups in order, and where the next one would go.

Theory. Groups follow one another without gaps, so reading the headers is a walk. Where the walk meets something that is no group of this
place, either the log ends there, or a page is damaged and groups lie behind it. A sealed segment says that it ends; in any other the rest
is searched page by page for a group that belongs there, and the walk goes on from it. A group of a life before the group in front of it
is a leftover from before a crash, and is none."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from kvpool.errors import FrameError
from kvpool.tier.pages import Bytes
from kvpool.tier.ssd.disk import PAGE, Disk, Piece
from kvpool.tier.ssd.format import (
    GROUP_MAGIC,
    MAX_HEADER_BYTES,
    SEAL,
    Group,
    SegmentPage,
    decode_group,
    decode_segment,
    encode_segment,
    group_header_bytes,
    up,
)
from kvpool.tier.ssd.lanes import aligned
from kvpool.units import KIB, MIB

MAX_ROT: Final = 8
"""Bytes of a segment's first page that may be wrong: all that is not zero in it has 44."""
_WALK: Final = 16 * KIB
_SEARCH: Final = MIB
_WORD: Final = int.from_bytes(GROUP_MAGIC, "little")


class Scan(NamedTuple):
    """One segment as found. `end`: where the last group ends. `damaged`: group headers of this segment that failed their checksum.
    `failure`: an errno of the first read that failed, 0."""

    slot: int
    page: SegmentPage
    groups: tuple[Group, ...]
    end: int
    sealed: bool
    damaged: int
    failure: int


@lru_cache(1 << 16)
def slot_name(slot: int) -> str:
    """The file of a slot."""
    return f"segment-{slot:05d}"


def slot_of(name: str) -> int | None:
    """The slot of a file, None for other files."""
    digits = name.removeprefix("segment-")
    return int(digits) if digits.isdecimal() and slot_name(int(digits)) == name else None


def scan_segment(disk: Disk, slot: int, segment_bytes: int) -> Scan | int | None:
    """None when the file holds no segment (never used, or its first page is damaged); an errno when that can't be told."""
    window = _Window(disk, slot_name(slot), segment_bytes)
    first = window.at(0, PAGE)
    if first is None:
        return window.failure
    damaged = 0
    page = _page(first.tobytes())
    if page is None:
        page, damaged = _rebuilt_page(window, first.tobytes(), segment_bytes), 1
    if page is None or page.segment_bytes != segment_bytes:
        return None
    groups: list[Group] = []
    end, life, sealed = PAGE, page.life, False
    for group in _walk(window, page.serial, page.life):
        if group is None:
            damaged += 1
        elif group.life >= life and group.offset >= end:
            groups.append(group)
            end, life = group.offset + group.total, group.life
            sealed = bool(group.flags & SEAL)
    return Scan(slot, page, tuple(groups), end, sealed, damaged, window.failure)


def _page(raw: bytes) -> SegmentPage | None:
    try:
        return decode_segment(raw)
    except FrameError:
        return None


def _rebuilt_page(window: "_Window", raw: bytes, segment_bytes: int) -> SegmentPage | None:
    """What a damaged first page said, told from the first group, if the page differs from that in few bytes only: a page that was erased,
    or that another page was written over, does not count."""
    try:
        page = window.at(PAGE, PAGE)
        length = group_header_bytes(b"" if page is None else page.tobytes())
        header = window.at(PAGE, up(length, PAGE))
        group = decode_group(b"" if header is None else header[:length].tobytes())
    except FrameError:
        return None
    told = SegmentPage(group.serial, group.life, segment_bytes)
    wrong = sum(a != b for a, b in zip(raw, encode_segment(told), strict=True))
    return told if group.offset == PAGE and wrong <= MAX_ROT else None


def _walk(window: "_Window", serial: int, life: int) -> Iterator[Group | None]:
    """Groups of this segment, oldest first; None for a header of it that is damaged."""
    offset, searching = PAGE, False
    while offset < window.size:
        if searching:
            found = window.search(offset)
            if found is None:
                return
            offset = found
        group, damaged = _group_at(window, offset, serial, life)
        if damaged:
            yield None
        searching = group is None
        if group is None:
            offset += PAGE
            continue
        yield group
        offset, life = offset + group.total, group.life
        if group.flags & SEAL:
            return


def _group_at(window: "_Window", offset: int, serial: int, life: int) -> tuple[Group | None, bool]:
    """The group whose header is at `offset`, and whether there is a damaged header instead."""
    page = window.at(offset, PAGE)
    if page is None or page[:8].tobytes() != GROUP_MAGIC:
        return None, False
    try:
        length = group_header_bytes(page.tobytes())
        raw = window.at(offset, up(length, PAGE))
        group = decode_group(b"" if raw is None else raw[:length].tobytes())
    except FrameError:
        mine = int.from_bytes(page[16:24].tobytes(), "little") == serial
        return None, mine
    belongs = group.serial == serial and group.life >= life and group.offset == offset and offset + group.total <= window.size
    return (group, False) if belongs else (None, False)


class _Window:
    """A file read in pieces of a few pages; what was read last is kept. `failure`: the first errno met."""

    def __init__(self, disk: Disk, name: str, size: int) -> None:
        self.size, self.failure = size, 0
        self._disk, self._name = disk, name
        self._memory: Bytes = aligned(max(_SEARCH, MAX_HEADER_BYTES + PAGE))
        self._start = self._end = 0

    def at(self, offset: int, length: int) -> Bytes | None:
        """`length` bytes, valid until the next call; None where they can't be read."""
        if offset + length > self.size:
            return None
        if not (self._start <= offset and offset + length <= self._end) and not self._load(offset, max(length, _WALK)):
            return None
        return self._memory[offset - self._start : offset - self._start + length]

    def search(self, offset: int) -> int | None:
        """The next page at or behind `offset` that begins like a group header."""
        while offset < self.size:
            if not self._start <= offset < self._end:
                self._load(offset, _SEARCH)
            if self._start <= offset < self._end:
                words = self._memory[offset - self._start : self._end - self._start].view(np.uint64)[:: PAGE // 8]
                hits = np.flatnonzero(words == _WORD)
                if hits.size:
                    return offset + int(hits[0]) * PAGE
                offset = self._end
            else:
                offset += PAGE  # a page that can't be read
        return None

    def _load(self, offset: int, length: int) -> bool:
        length = min(length, self.size - offset)
        failure = self._disk.read([Piece(self._name, offset, self._memory[:length])])[0]
        if failure and length > PAGE:
            length = PAGE
            failure = self._disk.read([Piece(self._name, offset, self._memory[:length])])[0]
        if failure:
            self.failure = self.failure or failure
            self._start = self._end = 0
            return False
        self._start, self._end = offset, offset + length
        return True
