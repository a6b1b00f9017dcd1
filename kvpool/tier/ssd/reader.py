"""Reading the data of a record out of its segment, and hashing it on the way.

Theory. The file is read in whole pages, the caller wants bytes. Where the caller's buffer and the data both start at a page, the whole
pages go straight into the buffer and only the last part passes through a staging buffer; otherwise all of it does, a megabyte at a time,
hashed and copied while it is in the processor's cache."""

import errno
import threading
from typing import Final, NamedTuple

import xxhash

from kvpool.clock import Clock
from kvpool.tier.pages import Bytes
from kvpool.tier.ssd.disk import PAGE, Disk, Piece
from kvpool.tier.ssd.format import up
from kvpool.tier.ssd.lanes import STAGE_BYTES, Lanes, patience
from kvpool.tier.ssd.scan import slot_name

FAILED_AFTER: Final = 8
"""Reads that fail in a row before the device counts as failed."""


class Fetched(NamedTuple):
    """`failure`: an errno, ETIMEDOUT for the deadline, 0 when all bytes came; `checksum`: xxh3_64 of them."""

    failure: int
    checksum: int = 0


class Reader:
    """Reads from segments. Thread-safe.
    `failures`: reads that failed in a row, the last with errno `last_failure`; `total_failures`: all."""

    def __init__(self, disk: Disk, lanes: Lanes, clock: Clock) -> None:
        self.failures = 0
        self.total_failures = 0
        self.last_failure = 0
        self.direct_bytes = 0
        self._disk, self._lanes, self._clock = disk, lanes, clock
        self._lock = threading.Lock()

    @property
    def failed(self) -> bool:
        """Whether the device seems to answer no read at all."""
        return self.failures >= FAILED_AFTER

    def fetch(self, slot: int, offset: int, length: int, into: Bytes | None, deadline_ns: int) -> Fetched:
        """Read `length` bytes at `offset` of a slot's file, into `into` if given, checking the deadline before each transfer."""
        whole = length - length % PAGE
        stage = self._lanes.take(patience(self._clock, deadline_ns))
        if stage is None:
            return Fetched(errno.ETIMEDOUT)
        try:
            if into is not None and whole and offset % PAGE == 0 and into.ctypes.data % PAGE == 0 and into.flags.c_contiguous:
                return self._straight(slot, offset, into, whole, stage, deadline_ns)
            return self._staged(slot, offset, length, into, stage, deadline_ns)
        finally:
            self._lanes.give(stage)

    def probe(self, name: str) -> int:
        """Read the first page of a file to see whether the device answers; an errno. A file that isn't there is no failure."""
        stage = self._lanes.take(0.0)
        if stage is None:
            return 0  # others read, and find out
        try:
            failure = self._read([Piece(name, 0, stage[:PAGE])])
        finally:
            self._lanes.give(stage)
        return 0 if failure == errno.ENOENT else failure

    def _straight(self, slot: int, offset: int, into: Bytes, whole: int, stage: Bytes, deadline_ns: int) -> Fetched:
        if self._clock.now_ns() >= deadline_ns:
            return Fetched(errno.ETIMEDOUT)
        pieces = [Piece(slot_name(slot), offset, into[:whole])]
        rest = into.size - whole
        if rest:
            pieces.append(Piece(slot_name(slot), offset + whole, stage[:PAGE]))
        failure = self._read(pieces)
        if failure:
            return Fetched(failure)
        if rest:
            into[whole:] = stage[:rest]
        self.direct_bytes += whole
        return Fetched(0, xxhash.xxh3_64_intdigest(into.data))

    def _staged(self, slot: int, offset: int, length: int, into: Bytes | None, stage: Bytes, deadline_ns: int) -> Fetched:
        hasher = None if length <= STAGE_BYTES else xxhash.xxh3_64()
        done = checksum = 0
        while done < length:
            if self._clock.now_ns() >= deadline_ns:
                return Fetched(errno.ETIMEDOUT)
            lead = (offset + done) % PAGE
            count = min(length - done, STAGE_BYTES)
            start = offset + done - lead
            failure = self._read([Piece(slot_name(slot), start, stage[: up(lead + count, PAGE)])])
            if failure:
                return Fetched(failure)
            part = stage[lead : lead + count]
            if hasher is None:
                checksum = xxhash.xxh3_64_intdigest(part.data)
            else:
                hasher.update(part.data)
            if into is not None:
                into[done : done + count] = part
            done += count
        return Fetched(0, checksum if hasher is None else hasher.intdigest())

    def _read(self, pieces: list[Piece]) -> int:
        failure = next((code for code in self._disk.read(pieces) if code), 0)
        if failure:
            with self._lock:
                self.failures += 1
                self.last_failure = failure
                self.total_failures += 1
        elif self.failures:
            self.failures = 0
        return failure
