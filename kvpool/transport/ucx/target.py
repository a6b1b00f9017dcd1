"""The node's end: an arena registered as remote memory, and a thread that keeps TCP moving.

Theory. With RDMA the network card serves a get by itself; over TCP the target's CPU has to, inside `ucp_worker_progress`. One thread does
nothing else. While there is traffic it polls; after `_SPIN_NS` without any it arms the worker's descriptor and sleeps in `poll`, so an idle
node costs no CPU, and a request that finds it asleep pays one wake-up (tens of microseconds).

Ending: the thread is a daemon, because a thread that the interpreter waits for before it runs its exit handlers would never be told to
stop. The finalizer (on `close`, on garbage collection, at exit) wakes it and waits while it takes UCX apart.
"""

import ctypes
import logging
import os
import select
import threading
import time
import weakref
from typing import Final

from kvpool.errors import ConfigError
from kvpool.transport.offer import UcxOffer
from kvpool.transport.reach import Bytes
from kvpool.transport.ucx import api
from kvpool.transport.ucx.drain import give_way
from kvpool.transport.ucx.session import UcpSession, UcxSettings
from kvpool.units import US

_log = logging.getLogger(__name__)

_SPIN_NS: Final = 50 * US
_SLEEP_MS: Final = 1000
_JOIN_S: Final = 5.0


class UcxTarget:
    """Offers the contiguous uint8 array `arena` to remote readers and writers until closed. Raises `ConfigError` without a usable UCX."""

    def __init__(self, arena: Bytes, *, settings: UcxSettings | None = None) -> None:
        if arena.ndim != 1 or not arena.flags.c_contiguous or arena.size == 0:
            raise ConfigError("the arena must be a contiguous, non-empty 1-D uint8 array")
        self._served = _Served(arena, settings or UcxSettings.from_environment())
        self._finish = weakref.finalize(self, self._served.stop)

    @property
    def offer(self) -> UcxOffer:
        """What others need to reach the arena. It opens all of it: see docs/transport.md on who may have it."""
        return self._served.offer

    @property
    def alive(self) -> bool:
        """Whether the arena is being served: False after `close`, or if UCX gave up (logged)."""
        return self._served.alive

    @property
    def library(self) -> str:
        """Which UCX is in use, for people."""
        return self._served.session.library.text

    def close(self) -> None:
        """Stop serving; twice is fine. Readers on the way get an error."""
        self._finish()


class _Served:
    """The resources of a target and its thread; knows nothing of the `UcxTarget`, so that the latter can be collected."""

    def __init__(self, arena: Bytes, settings: UcxSettings) -> None:
        self._arena = arena  # kept alive: UCX holds its address
        self._process = os.getpid()
        self.session = UcpSession(settings)
        try:
            self._memory = self._register()
            self.offer = UcxOffer(worker_address=self._address(), rkey=self._rkey(), base_address=arena.ctypes.data, length=arena.size)
        except ConfigError:
            self.session.destroy()
            raise
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._unwake = weakref.finalize(self, os.close, self._wake)
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="kvpool-ucx-target", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    def stop(self) -> None:
        if os.getpid() != self._process:
            return
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        if threading.current_thread() is self._thread:
            return  # collected while this very thread ran: it ends by itself
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            _log.error("the UCX target's thread did not stop in %.0f s; its memory stays registered", _JOIN_S)

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self.session.descriptor, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        try:
            while not self._stopping:
                self._drain()
                if self.session.arm():
                    poller.poll(_SLEEP_MS)
        except ConfigError:
            _log.exception("the UCX target stops serving")
        finally:
            self.session.calls.ucp_mem_unmap(self.session.context, self._memory)
            self.session.destroy()

    def _drain(self) -> None:
        """Progress until nothing has happened for `_SPIN_NS`."""
        progress, now = self.session.progress, time.monotonic_ns
        until = now() + _SPIN_NS
        while not self._stopping:
            if progress():
                until = now() + _SPIN_NS
            elif now() >= until:
                return
            else:
                give_way()

    def _register(self) -> int:
        parameters = api.MemMapParams(
            field_mask=api.MEM_MAP_ADDRESS | api.MEM_MAP_LENGTH, address=self._arena.ctypes.data, length=self._arena.size
        )
        memory = ctypes.c_void_p()
        self._require(
            self.session.calls.ucp_mem_map(self.session.context, ctypes.byref(parameters), ctypes.byref(memory)), "register the arena"
        )
        return memory.value or 0

    def _address(self) -> bytes:
        address, length = ctypes.c_void_p(), ctypes.c_size_t()
        calls, worker = self.session.calls, self.session.worker
        self._require(calls.ucp_worker_get_address(worker, ctypes.byref(address), ctypes.byref(length)), "tell its address")
        try:
            return ctypes.string_at(address.value or 0, length.value)
        finally:
            calls.ucp_worker_release_address(worker, address)

    def _rkey(self) -> bytes:
        buffer, length = ctypes.c_void_p(), ctypes.c_size_t()
        calls, context = self.session.calls, self.session.context
        self._require(calls.ucp_rkey_pack(context, self._memory, ctypes.byref(buffer), ctypes.byref(length)), "pack the arena's key")
        try:
            return ctypes.string_at(buffer.value or 0, length.value)
        finally:
            calls.ucp_rkey_buffer_release(buffer)

    def _require(self, status: int, what: str) -> None:
        if status != api.OK:
            hint = "if the locked memory limit is low (ulimit -l), raise it"
            raise ConfigError(f"{self.session.library.text} can't {what}: {api.status_text(status)}; {hint}")
