"""Which blocks are on their way into this worker, and who brings them. Pure.

Theory. A sequence that lacks blocks *claims* all keys of them that nobody else has claimed: it is going to load or to compute them, and
will name them (`paged/blocks.py`) as they come. Whoever lacks a claimed block waits for it instead of bringing it too. Nobody waits in a
circle: a sequence waits for the first block that it lacks only. Who brings that one has the same chain up to there, so if it waits itself,
it is for that block or one before it, which the first one lacks too: for the same block then, and so for itself.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvpool.block import BlockKey
from kvpool.engine.schedule.work import Work


class Part:
    """What one sequence brings, from when it is admitted until it leaves, gives way, or has all its KV."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.keys: list[BlockKey] = []
        self.loading = False
        """Whether its blocks come from the pool now; if not, they are being computed, or about to be."""
        self.gone = False
        self.waiting = 0
        """How many wait for it now."""

    @property
    def stuck(self) -> bool:
        """Whether it is kept from going on by its own reader, for who knows how long."""
        return self.work.paused

    @property
    def wanted(self) -> bool:
        """Whether anybody wants what it loads."""
        return not self.gone or self.waiting > 0

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Somebody waits for it, for the length of the block."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1


class Coming:
    """All claims of one worker."""

    def __init__(self) -> None:
        self._by_key: dict[BlockKey, Part] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def claim(self, part: Part, keys: Sequence[BlockKey]) -> Part | None:
        """Claim what nobody else brings of `keys`; who else brings the first one, if so."""
        other = self._by_key.get(keys[0]) if keys else None
        if other is not None and (other is part or other.stuck):
            other = None
        for key in keys:
            if key not in self._by_key:
                self._by_key[key] = part
                part.keys.append(key)
        return other

    def take(self, part: Part, keys: Sequence[BlockKey]) -> None:
        """Claim all `keys`, whoever was to bring them."""
        for key in keys:
            self._by_key[key] = part
        part.keys.extend(keys)

    def end(self, part: Part) -> None:
        """It has brought what it could. Again: nothing."""
        for key in part.keys:
            if self._by_key.get(key) is part:
                del self._by_key[key]
        part.keys.clear()
