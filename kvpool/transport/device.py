"""Bytes between this process's memory and a caller's tensors on a device: what is promised, and which mappings are page-locked for it.

Theory. A device's copy engine reads and writes host memory by itself only where pages are locked and known to it; everything else goes
through a buffer of the driver's, slower. Locking costs far more than a copy, so a mapping is locked as a whole, once, and stays so until
it goes. The one place that knows when it goes is the array at the root of all views of it: a finalizer of that array runs when the last
view is gone and before the memory is unmapped.

No torch here, nor in anything that imports this: `cuda.py` is handed the one that made the caller's tensor.
"""

import logging
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from kvpool.transport.reach import Bytes
from kvpool.units import format_size

log = logging.getLogger(__name__)

Rows = Any
"""Blocks on a device as bytes, `[n, row bytes]`; only their device reads them. Indexing gives a row, slicing rows."""


class Device(Protocol):
    """One device, with a queue of copies of its own (a CUDA stream). For any thread. What the device itself reports goes to the caller."""

    def rows(self, blocks: Any, row_bytes: int) -> Rows:
        """The contiguous tensor `blocks` as uint8 `[n, row_bytes]` over the same memory."""
        ...

    def settled(self, deadline_ns: int) -> bool:
        """Wait for what this thread has queued on the device so far (its current stream); False when that isn't done by `deadline_ns`."""
        ...

    def to_device(self, rows: Rows, sources: Sequence[Bytes]) -> None:
        """Begin to copy each source to its row. Both must stay as they are until `wait` returns."""
        ...

    def to_host(self, target: Bytes, row: Any) -> None:
        """Begin to copy a row to `target`. Both must stay as they are until `wait` returns."""
        ...

    def wait(self) -> None:
        """Until all copies that were begun are done. Without a limit: bytes that a copy engine still reads can't be given away."""
        ...

    def page_locked(self, nbytes: int) -> Bytes:
        """A new page-locked buffer. Raises `ConfigError` when there is no memory for it."""
        ...

    def register(self, address: int, nbytes: int) -> str:
        """Page-lock memory for all devices; why not, or nothing."""
        ...

    def unregister(self, address: int) -> None:
        """Undo it. A refusal goes to the log."""
        ...


class Pins:
    """The mappings that are page-locked, or that can't be."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}
        self._lock = threading.Lock()

    def lock(self, view: Bytes, device: Device) -> bool:
        """Page-lock all of the mapping that `view` shows part of, unless that was tried before; whether it is locked.

        Takes long the first time, since every page is locked. Where it fails, copies work all the same, slower; the log says so once.
        """
        root = _root(view)
        address = root.ctypes.data
        with self._lock:
            known = self._known.get(address)
            if known is not None:
                return known
            reason = device.register(address, root.nbytes)
            self._known[address] = not reason
            weakref.finalize(root, _end, self._known, address, device, os.getpid()).atexit = False  # then the kernel undoes all
        if reason:
            size = format_size(root.nbytes)
            log.warning("%s of a node's memory can't be page-locked, so copies to and from the device are slower: %s", size, reason)
        return not reason


def _root(view: Bytes) -> Bytes:
    """The array that all views of the same memory keep alive."""
    while isinstance(view.base, np.ndarray):
        view = view.base
    return view


def _end(known: dict[int, bool], address: int, device: Device, process: int) -> None:
    """The mapping goes. In a forked child nothing is done: what is locked is the parent's."""
    if known.pop(address) and os.getpid() == process:
        device.unregister(address)
