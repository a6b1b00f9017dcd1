"""A tier whose records are encrypted and authenticated: AES-256-GCM around every record of another tier.

A stored record is `magic(4) key id(8) nonce(12) ciphertext tag(16)`, so `OVERHEAD` bytes longer than the frame. Each record is sealed under
a key of its own, HMAC-SHA256(file key, block key), so that random nonces never meet however many records there are; the block key and the
length are authenticated with it. A record that doesn't open (changed, moved to another name, sealed by a key that isn't in the file, or not
sealed at all) is a miss, is dropped and counted as corrupt: never wrong bytes.

What is not hidden: block keys, lengths, depths, expiry times and tenants' names, which stand in the index of the tier below.
"""

import hashlib
import hmac
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvpool.block import BlockKey
from kvpool.errors import ConfigError
from kvpool.tier.contract import Entry, Record, Tier, TierBooks, TierWatcher, check_record
from kvpool.tier.pages import Bytes

MAGIC = b"kvS1"
_ID_BYTES, _NONCE_BYTES, _TAG_BYTES, _KEY_BYTES = 8, 12, 16, 32
_HEAD = len(MAGIC) + _ID_BYTES + _NONCE_BYTES
OVERHEAD = _HEAD + _TAG_BYTES
"""Bytes that sealing adds to a record."""
MAX_KEYS = 64
_AAD = struct.Struct("<32sQ")
_RECORD = b"kvpool/ssd-record/v1\0"
_ID = b"kvpool/ssd-key-id/v1\0"


class SealKeys:
    """The first of `keys` (32 bytes each) seals, all of them open. Raises `ConfigError`."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not 1 <= len(keys) <= MAX_KEYS or any(len(key) != _KEY_BYTES for key in keys):
            raise ConfigError(f"between 1 and {MAX_KEYS} keys of {_KEY_BYTES} bytes are needed to seal records")
        self._by_id = {hmac.digest(key, _ID, hashlib.sha256)[:_ID_BYTES]: key for key in keys}
        self._newest = next(iter(self._by_id))

    @classmethod
    def load(cls, path: Path) -> "SealKeys":
        """From a file with one key a line, 64 hex digits each; put a new one first and keep the old ones below. Raises `ConfigError`."""
        try:
            return cls([bytes.fromhex(line) for line in path.read_text("ascii").split()])
        except OSError as error:
            raise ConfigError(f"can't read {path}: {error.strerror}") from None
        except ValueError:
            raise ConfigError(f"{path} must hold keys of 64 hex digits, one a line; make one with `openssl rand -hex 32`") from None

    def seal(self, key: BlockKey, data: Bytes) -> Bytes:
        """The sealed form of a record, `OVERHEAD` bytes longer."""
        out = np.empty(data.size + OVERHEAD, np.uint8)
        nonce = os.urandom(_NONCE_BYTES)
        out[:_HEAD] = np.frombuffer(MAGIC + self._newest + nonce, np.uint8)
        self._cipher(self._newest, key).encrypt_into(nonce, data.data, _AAD.pack(key, data.size), out[_HEAD:].data)
        return out

    def open(self, key: BlockKey, sealed: Bytes, into: Bytes) -> bool:
        """Fill `into` with the record that was sealed for `key`; False when it wasn't, and then `into` means nothing."""
        head = sealed[:_HEAD].tobytes()
        key_id, nonce = head[len(MAGIC) : len(MAGIC) + _ID_BYTES], head[_HEAD - _NONCE_BYTES :]
        if sealed.size != into.size + OVERHEAD or not head.startswith(MAGIC) or key_id not in self._by_id:
            return False
        try:
            self._cipher(key_id, key).decrypt_into(nonce, sealed[_HEAD:].data, _AAD.pack(key, into.size), into.data)
        except InvalidTag:
            return False
        return True

    def _cipher(self, key_id: bytes, key: BlockKey) -> AESGCM:
        return AESGCM(hmac.digest(self._by_id[key_id], _RECORD + key, hashlib.sha256))


class SealedTier:
    """`Tier` that keeps its records sealed in `inner`, which it owns. Lengths are those of the frames throughout."""

    def __init__(self, inner: Tier, keys: SealKeys) -> None:
        self._inner = inner
        self._keys = keys
        self._unopened = self._scrubbed = self._scrubbed_bytes = 0
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """Of the tier below."""
        return self._inner.name

    @property
    def durable(self) -> bool:
        """As the tier below."""
        return self._inner.durable

    def put(self, records: Sequence[Record], deadline_ns: int) -> list[bool]:
        """See `Tier.put`."""
        for record in records:
            check_record(record)
        sealed = [record._replace(data=self._keys.seal(record.key, record.data)) for record in records]
        return self._inner.put(sealed, deadline_ns)

    def get(self, wanted: Sequence[tuple[BlockKey, Bytes]], deadline_ns: int) -> list[bool]:
        """See `Tier.get`."""
        sealed = [(key, np.empty(buffer.size + OVERHEAD, np.uint8)) for key, buffer in wanted]
        found = self._inner.get(sealed, deadline_ns)
        return [hit and self._opens(key, held, buffer) for hit, (key, held), (_, buffer) in zip(found, sealed, wanted, strict=True)]

    def find(self, keys: Sequence[BlockKey], now_ms: int | None = None) -> list[Entry | None]:
        """See `Tier.find`."""
        return [None if entry is None else _plain(entry) for entry in self._inner.find(keys, now_ms)]

    def remove(self, keys: Sequence[BlockKey]) -> int:
        """See `Tier.remove`."""
        return self._inner.remove(keys)

    def coldest(self, nbytes: int) -> list[BlockKey]:
        """See `Tier.coldest`."""
        return self._inner.coldest(nbytes)

    def entries(self) -> Iterator[Entry]:
        """See `Tier.entries`."""
        return map(_plain, self._inner.entries())

    def watch(self, watcher: TierWatcher) -> None:
        """See `Tier.watch`."""
        self._inner.watch(lambda key, entry: watcher(key, None if entry is None else _plain(entry)))

    def verify(self, key: BlockKey) -> bool | None:
        """See `Tier.verify`: the tier below checks its own sum first, then the record must open. It is read, but counted as no hit."""
        sound = self._inner.verify(key)
        entry = self._inner.find([key])[0] if sound else None
        if entry is None:
            return sound
        held = np.empty(entry.length, np.uint8)
        if not self._inner.get([(key, held)], _NEVER_NS)[0]:
            return None
        with self._lock:
            self._scrubbed += 1
            self._scrubbed_bytes += held.size
        return self._opens(key, held, np.empty(max(0, entry.length - OVERHEAD), np.uint8))

    def books(self) -> TierBooks:
        """See `Tier.books`; `unopened` counts those of the corrupt that did not open."""
        books = self._inner.books()
        counters = dict(books.counters)
        with self._lock:
            unopened = self._unopened
            counters["hits"] -= self._scrubbed
            counters["hit_bytes"] -= self._scrubbed_bytes
        counters["put_bytes"] -= OVERHEAD * counters["puts"]
        counters["hit_bytes"] -= OVERHEAD * counters["hits"]
        counters["corrupt"] += unopened
        counters["unopened"] = unopened
        return replace(books, counters=counters)

    def close(self) -> None:
        """See `Tier.close`."""
        self._inner.close()

    def _opens(self, key: BlockKey, held: Bytes, into: Bytes) -> bool:
        if self._keys.open(key, held, into):
            return True
        with self._lock:
            self._unopened += self._inner.remove([key])
        return False


_NEVER_NS = (1 << 63) - 1


def _plain(entry: Entry) -> Entry:
    """As the caller put it. A record too short to be sealed can't be opened, whatever length is said."""
    return entry._replace(length=max(1, entry.length - OVERHEAD))
