"""This host's cores: whether one has nothing to do, and which one runs the calling thread.

Theory. Work that a second thread shares, or an answer that is waited for without sleeping, comes sooner only where a core is idle;
elsewhere it takes time from somebody who needs it. The kernel tells in two microseconds how many threads want to run just now: the fourth
field of `/proc/loadavg`, which counts the caller.

A thread that is woken may be put on the core of who wakes it while another core is idle: where cores that share a cache are moderately busy
the kernel doesn't look for an idle one. Both then run by turns. Whoever wants them side by side has to say so (`apart`).
"""

import contextlib
import ctypes
import os
from typing import Final

_PATH: Final = "/proc/loadavg"
_BYTES: Final = 64
_CORES: Final = os.cpu_count() or 1
_files: list[int] = []

_getcpu = getattr(ctypes.PyDLL(None), "sched_getcpu", None)  # keeps the GIL: it takes 0.1 us


def current() -> int:
    """The core that runs the caller just now; -1 where nobody can tell."""
    return -1 if _getcpu is None else int(_getcpu())


def running() -> int:
    """How many threads of this host run or wait for a core, the caller among them; 0 where the kernel doesn't tell."""
    try:
        if not _files:
            _files.append(os.open(_PATH, os.O_RDONLY | os.O_CLOEXEC))
        return int(os.pread(_files[0], _BYTES, 0).split(None, 4)[3].split(b"/", 1)[0])
    except (OSError, ValueError, IndexError):
        return 0


def spare() -> bool:
    """Whether a core has nothing to do; False where nobody can tell."""
    return 0 < running() < _CORES


def wanted() -> bool:
    """Whether a thread waits for a core that another one has; True where nobody can tell."""
    return not 0 < running() <= _CORES


def apart(thread: int) -> bool:
    """Let a thread of this process (a native id, 0: the caller) run on any core that the caller may use but its present one.

    False: there is none.
    """
    others = os.sched_getaffinity(0) - {current()}
    if not others:
        return False
    with contextlib.suppress(OSError):  # it has ended, or a core has gone: then it runs where it did
        os.sched_setaffinity(thread, others)
    return True


def leave() -> None:
    """Go to another core than the one that the caller is on, if it may use others; it may come back."""
    mine = os.sched_getaffinity(0)
    if apart(0):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, mine)
