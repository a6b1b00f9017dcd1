"""One UCP endpoint to a node, its key, and the requests on the way on it.

Theory. Where the hardware serves a get or a put by itself (RDMA), any number of requests may be on the way. Over TCP, UCX emulates them
with messages that the target's CPU answers, and a target that has to answer a second message of a connection that has just failed calls
`abort()` (`ucp_request.inl`, "unexpected error", in every UCX up to 1.22): one killed client would take a node's data plane down. So on an
emulated lane one message is on the way at a time, and it fits one TCP segment: a peer that goes away leaves the target one answer to send,
and that one may fail. On one host it costs no speed; between hosts, lanes side by side hide the round trip.

Whoever has no error handler is aborted by UCX when a connection over RDMA breaks (`api.IGNORE_ERROR`). Ours does nothing: every request
ends with an error, too, and that is where failures are dealt with.

A put is complete when a flush of the endpoint is: the bytes are in the node's memory then, not only out of ours.
"""

import ctypes
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from kvpool.errors import UnavailableError
from kvpool.transport.offer import UcxOffer
from kvpool.transport.reach import Run
from kvpool.transport.ucx import api
from kvpool.transport.ucx.session import MESSAGE_BYTES, UcpSession

WINDOW: Final = 64
_MAX_TRANSPORTS: Final = 16
_ONE_SIDED: Final = ("rc", "dc")
_NEWEST_ADDRESS: Final = 1  # what UCX up to 1.23 calls v2; the low half of an address's first byte
_LEAST_ADDRESS, _LEAST_RKEY = 10, 9  # header, worker and one byte more; map of memory domains and kind of memory


class Lane:
    """An endpoint with error handling on. Raises `UnavailableError` when the offer leads nowhere from here; sends nothing yet."""

    def __init__(self, session: UcpSession, offer: UcxOffer) -> None:
        self._calls = session.calls
        self._base = offer.base_address
        self._param = ctypes.byref(api.RequestParam(op_attr_mask=api.OP_MEMORY_TYPE, memory_type=api.MEMORY_TYPE_HOST))
        self._rkey: int | None = None
        self.pending: deque[int] = deque()
        self.one_sided = False
        check_offer(offer)
        self._handle = self._connect(session.worker, offer.worker_address)
        try:
            self._rkey = self._unpack(offer.rkey)
        except UnavailableError:
            self.force()
            raise

    @property
    def room(self) -> bool:
        """Whether another request may be posted."""
        return len(self.pending) < WINDOW if self.one_sided else not self.pending

    def post(self, run: Run, buffer: int, *, put: bool) -> None:
        """Start moving `run` from or to the buffer at address `buffer`. Raises `UnavailableError` if it fails at once."""
        call = self._calls.ucp_put_nbx if put else self._calls.ucp_get_nbx
        self._admit(call(self._handle, buffer + run.at, run.length, self._base + run.offset, self._rkey, self._param))
        if put and not self.one_sided:
            self.flush()

    def flush(self) -> None:
        """Start a flush: it ends when all puts before it are in the node's memory. Raises `UnavailableError` if it fails at once."""
        self._admit(self._calls.ucp_ep_flush_nbx(self._handle, self._param))

    def reap(self) -> None:
        """Free the requests that are done, oldest first. Raises `UnavailableError` for one that failed."""
        pending, check = self.pending, self._calls.ucp_request_check_status
        while pending:
            status = check(pending[0])
            if status == api.IN_PROGRESS:
                return
            self._calls.ucp_request_free(pending.popleft())
            if status != api.OK:
                raise UnavailableError(f"the node went away: {api.status_text(status)}")

    def force(self) -> None:
        """Start the forced close, which ends every request. The lane is over when `sweep` says so."""
        param = api.RequestParam(op_attr_mask=api.OP_FLAGS, flags=api.EP_CLOSE_FORCE)
        closing: int | None = self._calls.ucp_ep_close_nbx(self._handle, ctypes.byref(param))
        if closing is not None and api.pointer_status(closing) == api.IN_PROGRESS:
            self.pending.append(closing)

    def sweep(self) -> bool:
        """Free the requests that have ended, well or not; True when none is left and the lane is over."""
        pending = self.pending
        while pending and self._calls.ucp_request_check_status(pending[0]) != api.IN_PROGRESS:
            self._calls.ucp_request_free(pending.popleft())
        if not pending and self._rkey is not None:
            self._calls.ucp_rkey_destroy(self._rkey)
            self._rkey = None
        return not pending

    def transports(self) -> tuple[str, ...]:
        """What UCX chose, such as `tcp/eth0`; known after the first transfer; empty where this UCX can't tell."""
        if not hasattr(self._calls, "ucp_ep_query"):
            return ()
        entries = (api.TransportEntry * _MAX_TRANSPORTS)()
        room = api.Transports(entries=entries, num_entries=_MAX_TRANSPORTS, entry_size=ctypes.sizeof(api.TransportEntry))
        attributes = api.EndpointAttr(field_mask=api.EP_ATTR_TRANSPORTS, transports=room)
        if self._calls.ucp_ep_query(self._handle, ctypes.byref(attributes)) != api.OK:
            return ()
        names = [(entry.transport_name or b"?", entry.device_name or b"?") for entry in entries[: attributes.transports.num_entries]]
        return tuple(sorted({f"{name.decode()}/{device.decode()}" for name, device in names}))

    def _admit(self, pointer: int | None) -> None:
        status = api.pointer_status(pointer)
        if pointer is not None and status == api.IN_PROGRESS:
            self.pending.append(pointer)
        elif status != api.OK:
            raise UnavailableError(f"the node can't be reached: {api.status_text(status)}")

    def _connect(self, worker: int, address: bytes) -> int | None:
        fields = api.EP_PARAM_REMOTE_ADDRESS | api.EP_PARAM_ERR_HANDLING_MODE | api.EP_PARAM_ERR_HANDLER
        ignore = api.ErrorHandler(cb=api.IGNORE_ERROR)
        parameters = api.EndpointParams(field_mask=fields, address=address, err_mode=api.ERR_HANDLING_PEER, err_handler=ignore)
        handle = ctypes.c_void_p()
        _require(self._calls.ucp_ep_create(worker, ctypes.byref(parameters), ctypes.byref(handle)))
        return handle.value

    def _unpack(self, packed: bytes) -> int | None:
        key = ctypes.c_void_p()
        _require(self._calls.ucp_ep_rkey_unpack(self._handle, packed, ctypes.byref(key)))
        return key.value


def is_one_sided(transports: Sequence[str]) -> bool:
    """Whether one of these is served by the network card alone; an unknown list is not."""
    return any(name.startswith(_ONE_SIDED) for name in transports)


def check_offer(offer: UcxOffer) -> None:
    """Raises `UnavailableError` for what would make UCX abort or read beyond the end: an address of a format to come, or a piece of one."""
    if len(offer.worker_address) < _LEAST_ADDRESS or len(offer.rkey) < _LEAST_RKEY:
        raise UnavailableError("the node's offer is cut short")
    if offer.worker_address[0] & 15 > _NEWEST_ADDRESS:
        raise UnavailableError("the node's UCX is newer than this kvpool knows: its address has another format")


def pieces(runs: Sequence[Run], *, one_sided: bool) -> Iterator[Run]:
    """The non-empty runs, cut to what one request may carry."""
    for offset, length, at in runs:
        step = max(1, length) if one_sided else MESSAGE_BYTES
        for start in range(0, length, step):
            yield Run(offset + start, min(step, length - start), at + start)


def _require(status: int) -> None:
    if status != api.OK:
        raise UnavailableError(f"the node's offer leads nowhere from here: {api.status_text(status)}")
