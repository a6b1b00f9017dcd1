"""What happened to a key: a small bounded history, read only when something is wrong.

One entry per call, not per key: an entry holds the call's keys, and `of(key)` searches. Recording costs one append; the search
is slow and happens inside an error message. The number of keys remembered over all entries is bounded; the oldest entries go.
"""

from collections import deque
from collections.abc import Sequence

from kvpool.block import BlockKey
from kvpool.errors import LocalError


class InvariantError(LocalError):
    """The pool's books don't balance: a defect of this process, never of its callers. The message tells the key's story."""


class Story:
    """Bounded history of calls; `max_keys` bounds the keys it remembers, over all entries."""

    __slots__ = ("_entries", "_keys", "_max_keys")

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._keys = 0
        self._entries: deque[tuple[int, str, int, Sequence[BlockKey]]] = deque()

    def record(self, now_ns: int, event: str, lease_id: int, keys: Sequence[BlockKey]) -> None:
        """`event` happened to `keys` (not to be changed afterwards) under `lease_id` (0: none)."""
        self._entries.append((now_ns, event, lease_id, keys))
        self._keys += len(keys) + 1
        while self._keys > self._max_keys:
            self._keys -= len(self._entries.popleft()[3]) + 1

    def of(self, key: BlockKey) -> list[str]:
        """The events of one key, oldest first, as lines of text."""
        return [
            f"{now_ns} ns: {event}" + (f" (lease {lease_id})" if lease_id else "")
            for now_ns, event, lease_id, keys in self._entries
            if key in keys
        ]

    def error(self, message: str, key: BlockKey) -> InvariantError:
        """An `InvariantError` about `key` that tells its story."""
        lines = self.of(key) or ["nothing remembered"]
        return InvariantError("\n    ".join([f"block {key.hex()}: {message}; its story:", *lines]))
