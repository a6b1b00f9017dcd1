"""Pages of a mapping: ask for big ones, and fault them in before anyone waits for them.

Theory. The first touch of a mapped page costs a page fault, so a copy into fresh pages runs several times slower than the same copy a
second time. `MADV_POPULATE_WRITE` fills the page table in one system call and reports a full file system as an error instead of a
SIGBUS. It is called through ctypes because that releases the GIL; a step at a time, so that a signal is served between two steps.

Huge pages and locking are asked for and may be refused, so both are looked up afterwards instead of believed. A copy into or out of small
pages takes up to 1.7 times as long, by where the kernel happened to put them; one of huge pages doesn't. For a file on shared memory the
kernel makes huge pages by itself only where `/sys/kernel/mm/transparent_hugepage/shmem_enabled` (or `huge=` of the mount) says so: by
default, never. `MADV_COLLAPSE` makes them whatever is said there (Linux 6.1). A process sees them as such only where address and offset
in the file are the same modulo their size, which `map_shared` takes care of.
"""

import ctypes
import errno
import mmap
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.units import KIB, MIB

Bytes = npt.NDArray[np.uint8]

_POPULATE_WRITE: Final = 23  # linux/mman.h, since 5.14; Python's mmap module has no name for it
HUGEPAGE: Final = 14
COLLAPSE: Final = 25  # since 6.1
HUGE: Final = 2 * MIB
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000  # Python's mmap module names it from 3.13 on
_STEP: Final = 64 * MIB
_PAGE: Final = 4096

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mlock.restype = ctypes.c_int

SMAPS: Final = Path("/proc/self/smaps")
_RANGE: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")
_BIG: Final = frozenset({"AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"})


def advise(start: int, nbytes: int, advice: int) -> int:
    """0, or the errno of `madvise` over `nbytes` bytes from the address `start`, which must be a page's."""
    return 0 if _libc.madvise(start, nbytes, advice) == 0 else ctypes.get_errno()


def _madvise(view: Bytes, advice: int) -> int:
    return advise(view.ctypes.data, view.size, advice)


def ask_for_huge_pages(view: Bytes) -> bool:
    """Ask the kernel for huge pages behind `view`; False where it has none for this kind of memory. Only a hint."""
    return _madvise(view, HUGEPAGE) == 0


def map_shared(descriptor: int, length: int, offset: int) -> Bytes:
    """`length` bytes of a file from `offset` (a page's) on, readable, writable and shared, placed so that its huge pages are seen as such.

    Unmapped with the last view of it. Raises `OSError`.
    """
    place = reserve(length + HUGE)
    skip = (offset - np.frombuffer(place, np.uint8).ctypes.data) % HUGE
    view = np.frombuffer(place, np.uint8, length, skip)  # nothing but the file's bytes: who locks a mapping locks all that its array has
    map_over(view.ctypes.data, length, mmap.PROT_READ | mmap.PROT_WRITE, descriptor, offset)
    return view


def map_over(address: int, length: int, protection: int, descriptor: int, offset: int) -> None:
    """Show `length` bytes of a file from `offset` on, shared, at `address` instead of what is mapped there; both are a page's.

    Whoever mapped it before unmaps both. Raises `OSError`.
    """
    if _libc.mmap(address, length, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor, offset) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def reserve(length: int, protection: int = mmap.PROT_READ | mmap.PROT_WRITE) -> mmap.mmap:
    """Addresses without memory behind them, to map files over."""
    return mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, protection)


def make_huge(view: Bytes) -> None:
    """Put huge pages behind the mapping `view` of shared memory, as far as the kernel has any to give. Keeps what is in it.

    To be called once the small pages are there (`populate`): making one of them takes a sixth of the time (0.3 s a GiB).
    """
    start = -view.ctypes.data % HUGE
    end = start + (view.size - start) // HUGE * HUGE
    for at in range(start, end, _STEP):
        if _madvise(view[at : min(at + _STEP, end)], COLLAPSE) in (errno.EINVAL, errno.ENOMEM):
            return  # not for this kind of memory, or there is no room: small pages do, too


def populate(view: Bytes, limit: int | None = None) -> int:
    """Fault in up to `limit` bytes of the writable page-aligned mapping `view` without changing them; returns the bytes faulted in.

    0 on a kernel older than 5.14: nothing breaks, the first touch of each page is slower. Raises `OSError` where the pages can't be had.
    """
    end = view.size if limit is None else min(limit, view.size)
    for start in range(0, end, _STEP):
        failure = _madvise(view[start : min(start + _STEP, end)], _POPULATE_WRITE)
        if failure == errno.EINVAL:
            return start
        if failure:
            raise OSError(failure, os.strerror(failure))
    return end


def touch(view: Bytes) -> None:
    """Fault in every page of a mapping that is known to hold only zeros, by writing one of them: the way for old kernels."""
    view[::_PAGE] = 0


def lock_pages(view: Bytes) -> int:
    """Keep the mapping `view` in memory, never swapped out; 0, or the errno: `ENOMEM` and `EPERM` mean RLIMIT_MEMLOCK is too low."""
    return 0 if _libc.mlock(view.ctypes.data, view.size) == 0 else ctypes.get_errno()


def huge_bytes(view: Bytes) -> int:
    """Bytes of `view` that are mapped by huge pages now, as the kernel tells; 0 where it doesn't."""
    try:
        with SMAPS.open() as lines:
            return huge_in(lines, view.ctypes.data, view.size)
    except OSError:
        return 0


def huge_in(lines: Iterable[str], start: int, length: int) -> int:
    """The same from the lines of an smaps file. A mapping of huge pages only (hugetlbfs, a memory device) counts in full."""
    found = inside = 0
    for line in lines:
        bounds = _RANGE.match(line)
        if bounds is not None:
            first, last = int(bounds[1], 16), int(bounds[2], 16)
            inside = max(0, min(last, start + length) - max(first, start))
        elif inside:
            name, _, rest = line.partition(":")
            size = int(rest.split()[0]) * KIB if rest.strip().endswith("kB") else 0
            if name in _BIG:
                found += min(size, inside)
            elif name == "KernelPageSize" and size > _PAGE:
                found += inside
    return min(found, length)
