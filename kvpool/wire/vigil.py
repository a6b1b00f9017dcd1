"""Whether to stay awake for what a peer on this host sends next, instead of sleeping until it comes.

Theory. A packet between two processes of one host takes a microsecond, waking a core that has gone to sleep for it ten to forty, and after
that the core runs at half its speed for a while, for its caches are cold. Who looks for the packet all the time has none of that, and uses
less CPU in all, if the packet comes soon and nobody else needs the core. So each end watches for a while where it may hope for it: the
packet before came a moment ago, no thread of the host waits for a core, and the last watches weren't in vain. After each one that was,
twice as many packets as before go by without one, up to 64. A peer that is idle is never watched for.
"""

from typing import Final

from kvpool import cores

_RECENT_NS: Final = 1_000_000
_LOOK_NS: Final = 1_000_000
"""How often cores are looked at."""
_MOST_MISSES: Final = 6


class Vigil:
    """Of one who waits, `watch_ns` at most. Not for two threads at once."""

    __slots__ = ("_free", "_last_ns", "_looked_ns", "_misses", "_skip", "_watch_ns", "brisk")

    def __init__(self, watch_ns: int) -> None:
        self._watch_ns = watch_ns
        self._last_ns = self._looked_ns = -_RECENT_NS - 1
        self._misses = self._skip = 0
        self._free = False
        self.brisk = False
        """Whether packets follow each other closely, and nobody waits for a core."""

    def until(self, now_ns: int) -> int:
        """A packet went by: until when to watch for the next one, monotonic; 0 for not at all. Then `ended` is owed."""
        recent, self._last_ns = now_ns - self._last_ns <= _RECENT_NS, now_ns
        if recent and now_ns - self._looked_ns >= _LOOK_NS:
            self._free, self._looked_ns = not cores.wanted(), now_ns
        self.brisk = recent and self._free
        if not self.brisk:
            return 0
        if self._skip:
            self._skip -= 1
            return 0
        return now_ns + self._watch_ns

    def ended(self, *, came: bool) -> None:
        """A watch is over; whether what it was for came."""
        self._misses = 0 if came else min(self._misses + 1, _MOST_MISSES)
        self._skip = 0 if came else 1 << self._misses
