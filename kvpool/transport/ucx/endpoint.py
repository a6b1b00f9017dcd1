"""One endpoint to one node: post, progress, wait, and end well. Used by one thread at a time; `UcxReach` sees to that.

Theory. UCX promises that a request ends only if its worker is progressed, and nothing about when. So every wait here has a deadline, and
whoever misses it must close the endpoint: while a request is outstanding the network may still write into the caller's buffer, and a
forced close is the one way to end it. If even that does not end within `_CLOSE_NS`, the memory UCX may still touch is kept for the life of
the process.

Requests are posted `_WINDOW` at a time and awaited in order. While bytes move the thread polls; when nothing has moved for `_SPIN_NS` it
arms the worker's descriptor and sleeps. A put is complete when a flush of the endpoint is: the bytes are in the node's memory then, not
only out of ours.

No buffer is registered by us: where a transport needs that, UCX does it itself and drops the registration when the memory is unmapped. A
cache of our own, by address, would send the network card to the pages a freed array once had.
"""

import ctypes
import logging
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvpool.errors import DeadlineError, UnavailableError
from kvpool.transport.offer import UcxOffer
from kvpool.transport.reach import Bytes, Run
from kvpool.transport.ucx import api
from kvpool.transport.ucx.session import UcpSession, UcxSettings
from kvpool.units import MS, SECOND, US

_log = logging.getLogger(__name__)

_WINDOW: Final = 64
_SPIN_NS: Final = 50 * US
_SLEEP_MS: Final = 20  # also how late a stop wish from another thread is seen
_CLOSE_NS: Final = 2 * SECOND
_MAX_LANES: Final = 16
_kept: list[object] = []  # what an endpoint that did not close may still touch


class Endpoint:
    """A session, an endpoint to the node of `offer`, and the key to its arena.

    Raises `ConfigError` (no usable UCX here) or `UnavailableError` (the offer leads nowhere from here). Moving sends the first byte.
    """

    def __init__(self, offer: UcxOffer, settings: UcxSettings) -> None:
        self._base = offer.base_address
        self._pending: deque[int] = deque()
        self._rkey: int | None = None
        self._handle: int | None = None
        self._param = ctypes.byref(api.RequestParam(op_attr_mask=api.OP_MEMORY_TYPE, memory_type=api.MEMORY_TYPE_HOST))
        self._session = UcpSession(settings)
        self._calls = self._session.calls
        self._poller = select.poll()
        self._poller.register(self._session.descriptor, select.POLLIN)
        try:
            self._handle = self._connect(offer)
            self._rkey = self._unpack(offer.rkey)
        except UnavailableError:
            self.close(None)
            raise

    @property
    def library(self) -> str:
        """Which UCX is in use, for people."""
        return self._session.library.text

    @property
    def outstanding(self) -> bool:
        """Whether requests are on the way: if so, only `close` makes their buffer safe."""
        return bool(self._pending)

    def move(self, runs: Sequence[Run], buffer: Bytes, *, put: bool, deadline_ns: int, stop: Callable[[], None]) -> None:
        """Get (or put) every run; the caller has checked their bounds. `stop` is asked now and then, and may raise.

        Raises `DeadlineError`, `UnavailableError` or what `stop` raises; then, if `outstanding`, the endpoint must be closed.
        """
        post: Callable[..., int | None] = self._calls.ucp_put_nbx if put else self._calls.ucp_get_nbx
        handle, rkey, base, param, address = self._handle, self._rkey, self._base, self._param, buffer.ctypes.data
        for offset, length, at in runs:
            if length == 0:
                continue
            if len(self._pending) >= _WINDOW:
                self._settle(_WINDOW - 1, deadline_ns, stop)
            self._admit(post(handle, address + at, length, base + offset, rkey, param))
        self._settle(0, deadline_ns, stop)
        if put:
            self._admit(self._calls.ucp_ep_flush_nbx(handle, param))
            self._settle(0, deadline_ns, stop)

    def transports(self) -> tuple[str, ...]:
        """The lanes UCX chose, such as `tcp/eth0`; empty where this UCX can't tell."""
        if not hasattr(self._calls, "ucp_ep_query"):
            return ()
        entries = (api.TransportEntry * _MAX_LANES)()
        room = api.Transports(entries=entries, num_entries=_MAX_LANES, entry_size=ctypes.sizeof(api.TransportEntry))
        attributes = api.EndpointAttr(field_mask=api.EP_ATTR_TRANSPORTS, transports=room)
        if self._calls.ucp_ep_query(self._handle, ctypes.byref(attributes)) != api.OK:
            return ()
        lanes = entries[: attributes.transports.num_entries]
        return tuple(sorted({f"{lane.transport_name.decode()}/{lane.device_name.decode()}" for lane in lanes}))

    def close(self, buffer: Bytes | None) -> bool:
        """Close by force, see every request end, free everything. Only once.

        False when UCX did not end in time: session and `buffer` (what outstanding requests may touch) are then kept for ever.
        """
        if not self._ended(self._force()):
            _log.error("a UCX endpoint did not close within %d s; its memory is kept", _CLOSE_NS // SECOND)
            _kept.append((self, buffer))
            return False
        if self._rkey is not None:
            self._calls.ucp_rkey_destroy(self._rkey)
        self._session.destroy()
        return True

    def _force(self) -> int | None:
        """Start the forced close; the request to wait for, if any."""
        if self._handle is None:
            return None
        param = api.RequestParam(op_attr_mask=api.OP_FLAGS, flags=api.EP_CLOSE_FORCE)
        pointer: int | None = self._calls.ucp_ep_close_nbx(self._handle, ctypes.byref(param))
        return pointer if api.pointer_status(pointer) == api.IN_PROGRESS else None

    def _ended(self, closing: int | None) -> bool:
        """Progress until the close and all requests have ended, `_CLOSE_NS` at most."""
        if closing is not None:
            self._pending.append(closing)
        until = time.monotonic_ns() + _CLOSE_NS
        while self._pending:
            self._session.progress()
            while self._pending and self._calls.ucp_request_check_status(self._pending[0]) != api.IN_PROGRESS:
                self._calls.ucp_request_free(self._pending.popleft())
            if self._pending and time.monotonic_ns() >= until:
                return False
        return True

    def _admit(self, pointer: int | None) -> None:
        """Take note of a posted request. Raises `UnavailableError` if it failed at once."""
        status = api.pointer_status(pointer)
        if status == api.IN_PROGRESS and pointer:
            self._pending.append(pointer)
        elif status != api.OK:
            raise UnavailableError(f"the node can't be reached: {api.status_text(status)}")

    def _settle(self, left: int, deadline_ns: int, stop: Callable[[], None]) -> None:
        """Progress until at most `left` requests are on the way."""
        progress, now = self._session.progress, time.monotonic_ns
        spin_until = now() + _SPIN_NS
        while self._reap() > left:
            moved, time_ns = progress(), now()
            if time_ns >= deadline_ns:
                raise DeadlineError("the deadline passed before the bytes had moved")
            stop()
            if moved:
                spin_until = time_ns + _SPIN_NS
            elif time_ns >= spin_until and self._session.arm():
                self._poller.poll(min(_SLEEP_MS, max(1, (deadline_ns - time_ns) // MS)))

    def _reap(self) -> int:
        """Free the requests that are done, oldest first; how many are left. Raises `UnavailableError` for one that failed."""
        pending, check = self._pending, self._calls.ucp_request_check_status
        while pending:
            status = check(pending[0])
            if status == api.IN_PROGRESS:
                break
            self._calls.ucp_request_free(pending.popleft())
            if status != api.OK:
                raise UnavailableError(f"the node went away: {api.status_text(status)}")
        return len(pending)

    def _connect(self, offer: UcxOffer) -> int | None:
        parameters = api.EndpointParams(
            field_mask=api.EP_PARAM_REMOTE_ADDRESS | api.EP_PARAM_ERR_HANDLING_MODE,
            address=offer.worker_address,
            err_mode=api.ERR_HANDLING_PEER,
        )
        handle = ctypes.c_void_p()
        self._require(self._calls.ucp_ep_create(self._session.worker, ctypes.byref(parameters), ctypes.byref(handle)))
        return handle.value

    def _unpack(self, packed: bytes) -> int | None:
        key = ctypes.c_void_p()
        self._require(self._calls.ucp_ep_rkey_unpack(self._handle, packed, ctypes.byref(key)))
        return key.value

    def _require(self, status: Any) -> None:
        if status != api.OK:
            raise UnavailableError(f"the node's offer leads nowhere from here: {api.status_text(status)}")
