"""What every tier below or beside the arena promises.

Theory. A tier is a place for whole frames, found by key. It knows nothing of what is in them. Records are immutable: a key names its bytes,
so a put of a key that is there already is a success and writes nothing. Misses, refusals and failures of a device are values; a tier never
answers with bytes that fail its own checksum, it drops them and counts them.

`put`, `get` and `verify` block and may be called from several threads at once. `find`, `entries`, `coldest` and `books` read the index in
memory only and hold a lock briefly, so an event loop may call them. After `close` every call but `close` raises `ClosedError`.

Counters that every tier has, in `TierBooks.counters`: `puts` records stored, `put_bytes`, `refused` records answered False, `hits` and
`misses` of get, `hit_bytes`, `corrupt` records dropped because their checksum was wrong, `expired` records dropped because their time was
over, `removed` records dropped by `remove`. A tier may have more.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

import numpy as np

from kvpool.block import KEY_BYTES, BlockKey
from kvpool.errors import ConfigError
from kvpool.tier.pages import Bytes

NEVER_MS: Final = 0
"""`expires_ms` of a record that never expires."""

DEFAULT_MAX_OBJECTS: Final = 1 << 16
"""Records a tier takes unless told otherwise; what bounds its metadata."""

COUNTERS: Final = ("puts", "put_bytes", "refused", "hits", "misses", "hit_bytes", "corrupt", "expired", "removed")
"""Counters that every tier's books have."""

TierState = Literal["ok", "read-only", "failed"]


class Record(NamedTuple):
    """One frame on its way into a tier. `data` is uint8 `[length]`, the whole frame, read only during the call; `depth` tokens stand
    before the block in its chain; `expires_ms` is wall clock unix time, 0 never; `sequence` is the tokens of the prompt it was written
    for, 0 unknown."""

    key: BlockKey
    parent: BlockKey | None
    depth: int
    data: Bytes
    expires_ms: int = NEVER_MS
    sequence: int = 0
    tenant: str = ""


class Entry(NamedTuple):
    """What a tier knows of a record without its bytes; `length` is the frame's bytes."""

    key: BlockKey
    parent: BlockKey | None
    depth: int
    length: int
    expires_ms: int = NEVER_MS
    sequence: int = 0
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBooks:
    """A tier's state now. `used_bytes` is what its records take of `capacity_bytes`, headers and rounding included, so it never exceeds it.

    `state` is `ok`, `read-only` (put answers False, get goes on) or `failed`; `reason` says why, and is empty when ok. A full tier is ok.
    """

    capacity_bytes: int
    used_bytes: int
    objects: int
    max_objects: int
    state: TierState
    reason: str
    counters: dict[str, int]


TierWatcher = Callable[[BlockKey, Entry | None], None]
"""Told of each record that is found from now on, and, with None, of each that is not any more. Called under locks of the tier, from any of
its threads, in the order in which it happens: it must be quick, and not call the tier."""


class Tier(Protocol):
    """A keyed store of frames. All deadlines are monotonic nanoseconds."""

    @property
    def name(self) -> str:
        """`gpu`, `shared`, `ssd` or `memory`."""
        ...

    @property
    def durable(self) -> bool:
        """Whether records survive the process."""
        ...

    def put(self, records: Sequence[Record], deadline_ns: int) -> list[bool]:
        """Per record: True when it is stored (durably, where the tier is durable) or was there already.

        False: no room, over a limit, expired, the tier is not writable, or the deadline passed first. A full or failing device never
        raises; `books().state` tells. Raises `ConfigError` on a malformed record (see `check_record`), before anything is stored.
        """
        ...

    def get(self, wanted: Sequence[tuple[BlockKey, Bytes]], deadline_ns: int) -> list[bool]:
        """Fill each buffer, uint8 `[length]` with the record's own length, and verify it. False is a miss: absent, expired, of another
        length, corrupt (dropped and counted), an I/O error, or the deadline passed first. After a miss the buffer's bytes mean nothing."""
        ...

    def find(self, keys: Sequence[BlockKey], now_ms: int | None = None) -> list[Entry | None]:
        """What is known of each key; expired records are None when `now_ms`, unix time, is given. No I/O, and the order stays."""
        ...

    def remove(self, keys: Sequence[BlockKey]) -> int:
        """Drop these; how many were there."""
        ...

    def coldest(self, nbytes: int) -> list[BlockKey]:
        """What this tier would give up first to make `nbytes` free beyond what is free now; may be empty for a self-evicting tier."""
        ...

    def entries(self) -> Iterator[Entry]:
        """A snapshot of everything stored."""
        ...

    def watch(self, watcher: TierWatcher) -> None:
        """Tell `watcher`, the only one, of every change from now on. A record that is over is told of when the tier drops it."""
        ...

    def verify(self, key: BlockKey) -> bool | None:
        """Read the record and check it. None: absent. False: corrupt, and dropped and counted."""
        ...

    def books(self) -> TierBooks:
        """The tier's state now."""
        ...

    def close(self) -> None:
        """Give everything back; twice is fine. Records of a durable tier stay."""
        ...


def check_record(record: Record) -> None:
    """Raise `ConfigError` unless the record is well formed: 32-byte keys, uint8 1-D contiguous data of at least one byte, no negatives."""
    if len(record.key) != KEY_BYTES or (record.parent is not None and len(record.parent) != KEY_BYTES):
        raise ConfigError(f"a key is {KEY_BYTES} bytes")
    data = record.data
    if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous or data.size == 0:
        raise ConfigError("a record's data must be a contiguous uint8 array of one dimension and at least one byte")
    if record.depth < 0 or record.expires_ms < 0 or record.sequence < 0:
        raise ConfigError("depth, expires_ms and sequence of a record must not be negative")


def entry_of(record: Record) -> Entry:
    """The record without its bytes."""
    return Entry(record.key, record.parent, record.depth, record.data.size, record.expires_ms, record.sequence, record.tenant)


def is_expired(expires_ms: int, now_ms: int) -> bool:
    """Whether a record with this expiry is over at `now_ms`."""
    return expires_ms != NEVER_MS and expires_ms <= now_ms
