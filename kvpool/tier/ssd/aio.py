"""Transfers that the kernel carries out by itself: Linux native AIO, called through ctypes.

Theory. One thread hands the kernel a transfer with `io_submit` and goes on hashing and copying; `io_getevents` tells later which have
ended. No thread is woken for each block, so one thread keeps a fast device busy. With O_DIRECT on files whose room is taken such a
transfer is truly asynchronous; through the page cache it is not, and threads do better there. The kernel completes a direct write in a
worker thread of its own, which costs more than it saves: the log uses this for reads.

A context (`io_setup`) takes some of the system's `fs.aio-max-nr`, and some sandboxes refuse it: then `KernelTransfers` raises `OSError`.
Transfers are submitted one at a time: in larger batches the kernel holds the first back till it has seen the last.
`struct iocb` and `struct io_event` are those of linux/aio_abi.h, little-endian.
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from kvpool.tier.ssd.disk import Piece
from kvpool.tier.ssd.handles import Handle, Handles

_IOCB: Final = struct.Struct("<QIiHhIQQqQII")  # data, key, rw flags, opcode, priority, descriptor, memory, bytes, offset, -, flags, -
_EVENT: Final = struct.Struct("<QQqq")  # data, iocb, result, -
_PREAD, _PWRITE = 0, 1
_NONE, _ONE = ctypes.c_long(0), ctypes.c_long(1)


class _Calls(NamedTuple):
    """Numbers of the system calls."""

    setup: int
    destroy: int
    getevents: int
    submit: int


_CALLS: Final = {"x86_64": _Calls(206, 207, 208, 209), "aarch64": _Calls(0, 1, 4, 2)}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class KernelTransfers:
    """See `Transfers`. `handles`: the files; `redo`: carries out one transfer at once, for the few that the kernel leaves unfinished."""

    def __init__(self, handles: Handles, depth: int, redo: Callable[[Piece, bool], int]) -> None:
        """Raises `OSError`: refused."""
        calls = _CALLS.get(platform.machine())
        if calls is None:
            raise OSError(errno.ENOSYS, f"no native AIO known for {platform.machine()}")
        self._calls, self._handles, self._redo = calls, handles, redo
        self._submit, self._getevents = ctypes.c_long(calls.submit), ctypes.c_long(calls.getevents)
        self._iocb = ctypes.create_string_buffer(_IOCB.size)
        self._iocbs = ctypes.byref(ctypes.c_void_p(ctypes.addressof(self._iocb)))
        self._events = ctypes.create_string_buffer(depth * _EVENT.size)
        self._going: dict[int, tuple[Piece, Handle, bool]] = {}
        self._over: list[tuple[int, int]] = []  # without the kernel's help
        context = ctypes.c_ulong(0)
        _call(ctypes.c_long(calls.setup), ctypes.c_long(depth), ctypes.byref(context))
        self._depth = ctypes.c_long(depth)
        self._context: ctypes.c_ulong | None = context

    def start(self, tag: int, piece: Piece, *, writing: bool) -> None:
        """Hand it to the kernel."""
        try:
            handle = self._handles.take(piece.name, writing=writing)
        except OSError as error:
            self._over.append((tag, error.errno or errno.EIO))
            return
        data, code = piece.data, _PWRITE if writing else _PREAD
        address = data.__array_interface__["data"][0]
        _IOCB.pack_into(self._iocb, 0, tag, 0, 0, code, 0, handle.descriptor, address, data.nbytes, piece.offset, 0, 0, 0)
        try:
            _call(self._submit, self._context, _ONE, self._iocbs)
        except OSError as error:
            self._handles.give(handle)
            failure = error.errno or errno.EIO
            self._over.append((tag, self._redo(piece, writing) if failure == errno.EAGAIN else failure))  # EAGAIN: out of memory
            return
        self._going[tag] = (piece, handle, writing)

    def ended(self, *, wait: bool) -> list[tuple[int, int]]:
        """See `Transfers.ended`."""
        over, self._over = self._over, []
        if not self._going:
            return over
        count = _call(self._getevents, self._context, _ONE if wait and not over else _NONE, self._depth, self._events, None)
        for tag, _, result, _ in _EVENT.iter_unpack(self._events.raw[: count * _EVENT.size]):
            piece, handle, writing = self._going.pop(tag)
            self._handles.give(handle)
            short = 0 <= result < piece.data.nbytes
            over.append((tag, self._redo(piece, writing) if short else max(0, -result)))
        return over

    def close(self) -> None:
        """See `Transfers.close`. With transfers under way the context is left to the end of the process: giving it back would wait."""
        if self._context is not None and not self._going:
            _call(ctypes.c_long(self._calls.destroy), self._context)
            self._context = None


def _call(*number_and_arguments: object) -> int:
    """A system call, again when a signal interrupts it. Raises `OSError`."""
    while True:
        result = int(_libc.syscall(*number_and_arguments))
        if result >= 0:
            return result
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
