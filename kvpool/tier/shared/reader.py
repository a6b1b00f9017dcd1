"""Reading another process's or host's shared tier without asking it.

Theory. A reader takes no lock and leaves no trace, so nothing it does or dies of can hurt the owner, and nothing keeps a record in place
while it is read. It copies first and asks afterwards: look the slot up, copy the payload, look again. Slot and superblock are as they were
and the checksum fits: a hit. They changed: the record moved or went, look up again, a few times. Every look invalidates what it reads.

A checksum that is wrong under a slot that did not change is counted as `damaged`: bytes rotted, or the memory needs flushes it did not get.
"""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import numpy as np
import xxhash

from kvpool.block import BlockKey
from kvpool.errors import FrameError, UnavailableError
from kvpool.tier.contract import Entry, is_expired
from kvpool.tier.memory import unix_ms
from kvpool.tier.pages import Bytes
from kvpool.tier.region import Region
from kvpool.tier.shared.coherence import Coherence
from kvpool.tier.shared.layout import (
    BUCKET_BYTES,
    KEY_AT,
    SLOT_BYTES,
    SUPERBLOCK_BYTES,
    RegionState,
    Shape,
    Slot,
    SlotState,
    buckets_of,
    decode_slot,
    decode_superblock,
    slot_at,
)
from kvpool.tier.shared.region import SharedRegion

LOOKS: Final = 4
"""How often one get looks a key up whose slot changes while it reads."""


class Seen(NamedTuple):
    """A slot as it was read: where, its bytes, what they say."""

    at: int
    raw: bytes
    slot: Slot


class SharedTierReader:
    """Finds and reads records of a shared tier by key. All calls may come from several threads.

    `counters`: `hits`, `hit_bytes`, `misses`, `again` (a slot changed under a read), `damaged`.
    """

    def __init__(self, region: Region, *, wall_ms: Callable[[], int] = unix_ms) -> None:
        """Over a region that the owner writes. Raises `UnavailableError` when its owner starts or has retired, `FrameError` when it is
        no shared tier."""
        self._region, self._wall_ms = region, wall_ms
        self._lock = threading.Lock()
        self.counters = dict.fromkeys(("hits", "hit_bytes", "misses", "again", "damaged"), 0)
        self._superblock = self._look(0, SUPERBLOCK_BYTES)
        self._shape, state = decode_superblock(self._superblock, region.capacity)
        if state is not RegionState.LIVE:
            raise UnavailableError(f"the owner of this shared tier is {state.name.lower()}, not live; attach again later")

    @classmethod
    def open(cls, path: str | Path, coherence: Coherence | None = None) -> "SharedTierReader":
        """Map `path` for reading only. Raises `UnavailableError` also when it isn't there, `FrameError`."""
        region = SharedRegion.attach(path, coherence)
        try:
            return cls(region)
        except (UnavailableError, FrameError):
            region.close()
            raise

    @property
    def shape(self) -> Shape:
        """Whose tier this is, and how large."""
        return self._shape

    @property
    def live(self) -> bool:
        """Whether the owner that was there at the attach has neither retired nor been followed by another. A dead one stays live."""
        return self._look(0, SUPERBLOCK_BYTES) == self._superblock

    def find(self, keys: Sequence[BlockKey], now_ms: int | None = None) -> list[Entry | None]:
        """What the owner announces of each key; expired ones are None when `now_ms` is given. All None once not `live`."""
        if not self.live:
            return [None] * len(keys)
        found = [self._find(key) for key in keys]
        entries = [None if seen is None else seen.slot.entry for seen in found]
        return [None if e is None or (now_ms is not None and is_expired(e.expires_ms, now_ms)) else e for e in entries]

    def get(self, wanted: Sequence[tuple[BlockKey, Bytes]], deadline_ns: int) -> list[bool]:
        """As `Tier.get`; a record that is taken away meanwhile is a miss, too. All False once not `live`. Raises the memory's `OSError`."""
        found = [self._get(key, into, deadline_ns) for key, into in wanted]
        with self._lock:
            self.counters["hits"] += sum(found)
            self.counters["hit_bytes"] += sum(into.size for (_, into), hit in zip(wanted, found, strict=True) if hit)
            self.counters["misses"] += len(found) - sum(found)
        return found

    def close(self) -> None:
        """Let the mapping go; twice is fine."""
        self._region.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _get(self, key: BlockKey, into: Bytes, deadline_ns: int) -> bool:
        for _ in range(LOOKS):
            if time.monotonic_ns() >= deadline_ns or not self.live:
                return False
            seen = self._find(key)
            if seen is None or seen.slot.entry.length != into.size or is_expired(seen.slot.entry.expires_ms, self._wall_ms()):
                return False
            at = self._shape.data_offset + seen.slot.offset
            self._region.invalidate(at, into.size)
            self._region.read(at, into)
            is_right = xxhash.xxh3_64_intdigest(np.ascontiguousarray(into).data) == seen.slot.checksum
            if self._unchanged(seen):
                self._count("damaged", not is_right)
                return is_right
            self._count("again")
        return False

    def _find(self, key: BlockKey) -> Seen | None:
        """The slot where `key` is ready. None: nowhere, or where the payload would lie outside the region."""
        for bucket in buckets_of(key, self._shape.buckets):
            start = slot_at(0) + bucket * BUCKET_BYTES
            bytes_of_bucket = self._look(start, BUCKET_BYTES)
            for at in range(0, BUCKET_BYTES, SLOT_BYTES):
                if not bytes_of_bucket.startswith(key, at + KEY_AT):
                    continue
                raw = bytes_of_bucket[at : at + SLOT_BYTES]
                slot = decode_slot(raw)
                if slot is None or slot.state is not SlotState.READY or slot.epoch != self._shape.epoch:
                    continue
                if slot.offset + slot.entry.length <= self._shape.capacity:
                    return Seen(start + at, raw, slot)
        return None

    def _unchanged(self, seen: Seen) -> bool:
        """Whether the bytes copied since `seen` are that record's: nothing was given away meanwhile, neither slot nor region."""
        return self._look(seen.at, SLOT_BYTES) == seen.raw and self.live

    def _look(self, offset: int, length: int) -> bytes:
        raw = np.empty(length, np.uint8)
        self._region.invalidate(offset, length)
        self._region.read(offset, raw)
        return raw.tobytes()

    def _count(self, what: str, by: int = 1) -> None:
        with self._lock:
            self.counters[what] += by
