"""Why a reader that takes no lock may trust what it read, and the one fence that this takes.

**Copying (a seqlock).** Each record of the board has a generation, odd while the record changes or is nobody's, even and above zero while
it is ready; it only grows. The owner alone writes::

    withdraw   generation := odd | full fence | only then the block's bytes may be given to others
    publish    bytes are in place | generation := odd | fields | generation := even | tag

    reader     generation | record | copy of the bytes | full fence | generation again: the same and even?

x86-64 (total store order) shows the stores of one processor to all others in the order of the program, and takes loads in the order of the
program. So a reader that sees a field or a byte which was stored after `generation := odd` sees that generation, or a later one, at its
second look. Each generation is one aligned 8-byte load or store, which is never torn: `memoryview.cast("Q")` and numpy's `take` of u64 both
do it so. Two things are outside that order, and the fences are for them: copies of whole ranges may store past the caches, so they may
overtake a plain store made before (the owner's fence), and string instructions promise little about their loads (the reader's).

**Holding.** A reader that wants to look at bytes for longer, without copying, says so in its cell; the owner looks there before it gives
bytes away::

    reader     hold := 1          | full fence | generation again: changed? then no hold
    owner      generation := odd  | full fence | hold? then the bytes stay (doomed) until it is gone

This is the one place where a store is followed by a load of something else, which even x86-64 may swap. With a full fence on both sides at
least one of the two sees the other's store: never does a reader go on with a block whose owner saw no hold.

**The fence.** Any locked instruction is a full fence on x86-64, and acquiring and releasing an uncontended `threading.Lock` executes two.

**Elsewhere** (`ORDERED` is False) none of this is promised. Readers there must check the payload's checksum of all they copied:
`Found.flags` and `Place.flags` say UNVERIFIED for every block. A hold makes a change unlikely there, not impossible: don't hand out views.
"""

import platform
import threading
from typing import Final

ORDERED: Final = platform.machine().lower() in ("x86_64", "amd64")
"""Whether this machine keeps the order that reading by generation alone needs."""


class Fence:
    """A full memory fence. One for each thread that uses it: contended, it would wait."""

    __slots__ = ("_acquire", "_release")

    def __init__(self) -> None:
        lock = threading.Lock()
        self._acquire, self._release = lock.acquire, lock.release

    def __call__(self) -> None:
        """What was stored before is seen by all before anything that follows is loaded or stored."""
        self._acquire()
        self._release()
