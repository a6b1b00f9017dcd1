"""Pages of a mapping: ask for big ones, and fault them in before anyone waits for them.

Theory. The first touch of a mapped page costs a page fault, so a copy into fresh pages runs several times slower than the same copy a
second time. `MADV_POPULATE_WRITE` fills the page table in one system call and reports a full file system as an error instead of a
SIGBUS. It is called through ctypes because that releases the GIL; a step at a time, so that a signal is served between two steps.
"""

import ctypes
import errno
import os
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.units import MIB

Bytes = npt.NDArray[np.uint8]

_POPULATE_WRITE: Final = 23  # linux/mman.h, since 5.14; Python's mmap module has no name for it
_HUGEPAGE: Final = 14
_STEP: Final = 64 * MIB
_PAGE: Final = 4096

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int


def _madvise(view: Bytes, advice: int) -> int:
    """0, or the errno of `madvise` over `view` (its start must be a page's)."""
    return 0 if _libc.madvise(view.ctypes.data, view.size, advice) == 0 else ctypes.get_errno()


def ask_for_huge_pages(view: Bytes) -> bool:
    """Ask the kernel for huge pages behind `view`; False where it has none for this kind of memory. Only a hint."""
    return _madvise(view, _HUGEPAGE) == 0


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
