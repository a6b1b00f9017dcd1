"""The part of UCP's C interface that kvpool uses: structures, constants, prototypes.

Checked against the headers of UCX 1.21 (`ucp/api/ucp.h`, `ucp_def.h`, `ucp_compat.h`); a test compiles them and compares every size and
offset. UCX reads only the fields named in a structure's mask, so the declarations stop after the last field in use and pad the rest:
one declaration fits every 1.x.

A function called through `ctypes.CDLL` runs without the GIL, so a thread inside UCX never stops the interpreter. For the same reason no
Python function is ever given to UCX as a callback: one called while the interpreter ends would never come back. Where UCX insists on one,
it gets a function of the C library that takes no notice of its arguments (`IGNORE_ERROR`).
"""

import ctypes as c
from typing import Any, Final

FEATURE_RMA: Final = 1 << 1
FEATURE_WAKEUP: Final = 1 << 4
THREAD_MODE_SERIALIZED: Final = 1
ERR_HANDLING_PEER: Final = 1
MEMORY_TYPE_HOST: Final = 0
EP_CLOSE_FORCE: Final = 1

# Status codes (ucs/type/status.h).
OK: Final = 0
IN_PROGRESS: Final = 1
ERR_BUSY: Final = -15
ERR_CANCELED: Final = -16
ERR_TIMED_OUT: Final = -20
ERR_LAST: Final = -100

# Which fields of a structure are filled in.
PARAM_FEATURES: Final = 1 << 0
PARAM_NAME: Final = 1 << 8
WORKER_PARAM_THREAD_MODE: Final = 1 << 0
EP_PARAM_REMOTE_ADDRESS: Final = 1 << 0
EP_PARAM_ERR_HANDLING_MODE: Final = 1 << 1
EP_PARAM_ERR_HANDLER: Final = 1 << 2
EP_ATTR_TRANSPORTS: Final = 1 << 3
MEM_MAP_ADDRESS: Final = 1 << 0
MEM_MAP_LENGTH: Final = 1 << 1
OP_FLAGS: Final = 1 << 4
OP_MEMORY_TYPE: Final = 1 << 6

_PAD: Final = c.c_char * 256


class ContextParams(c.Structure):
    """`ucp_params_t` up to the name."""

    _fields_ = (
        ("field_mask", c.c_uint64),
        ("features", c.c_uint64),
        ("request_size", c.c_size_t),
        ("request_init", c.c_void_p),
        ("request_cleanup", c.c_void_p),
        ("tag_sender_mask", c.c_uint64),
        ("mt_workers_shared", c.c_int),
        ("estimated_num_eps", c.c_size_t),
        ("estimated_num_ppn", c.c_size_t),
        ("name", c.c_char_p),
        ("padding", _PAD),
    )


class WorkerParams(c.Structure):
    """`ucp_worker_params_t` up to the thread mode."""

    _fields_ = (("field_mask", c.c_uint64), ("thread_mode", c.c_int), ("padding", _PAD))


class ErrorHandler(c.Structure):
    """`ucp_err_handler_t`: what UCX calls when an endpoint has failed."""

    _fields_ = (("cb", c.c_void_p), ("arg", c.c_void_p))


class EndpointParams(c.Structure):
    """`ucp_ep_params_t` up to the error handler."""

    _fields_ = (
        ("field_mask", c.c_uint64),
        ("address", c.c_char_p),
        ("err_mode", c.c_int),
        ("err_handler", ErrorHandler),
        ("padding", _PAD),
    )


class MemMapParams(c.Structure):
    """`ucp_mem_map_params_t` up to the length."""

    _fields_ = (("field_mask", c.c_uint64), ("address", c.c_void_p), ("length", c.c_size_t), ("padding", _PAD))


class RequestParam(c.Structure):
    """`ucp_request_param_t`, whole."""

    _fields_ = (
        ("op_attr_mask", c.c_uint32),
        ("flags", c.c_uint32),
        ("request", c.c_void_p),
        ("callback", c.c_void_p),
        ("datatype", c.c_uint64),
        ("user_data", c.c_void_p),
        ("reply_buffer", c.c_void_p),
        ("memory_type", c.c_int),
        ("recv_info", c.c_void_p),
        ("memh", c.c_void_p),
        ("padding", _PAD),
    )


class TransportEntry(c.Structure):
    """`ucp_transport_entry_t`: one lane of an endpoint."""

    _fields_ = (("transport_name", c.c_char_p), ("device_name", c.c_char_p))


class Transports(c.Structure):
    """`ucp_transports_t`: room for the lanes of an endpoint."""

    _fields_ = (("entries", c.POINTER(TransportEntry)), ("num_entries", c.c_uint), ("entry_size", c.c_size_t))


class EndpointAttr(c.Structure):
    """`ucp_ep_attr_t` up to the transports (two `struct sockaddr_storage` of 128 bytes in between)."""

    _fields_ = (
        ("field_mask", c.c_uint64),
        ("name", c.c_char * 32),
        ("local_sockaddr", c.c_uint64 * 16),
        ("remote_sockaddr", c.c_uint64 * 16),
        ("transports", Transports),
        ("padding", _PAD),
    )


IGNORE_ERROR: Final = c.cast(c.CDLL(None).sched_yield, c.c_void_p)
"""An error handler that does nothing. Without one a broken RDMA connection is "not handled" to UCX up to 1.22, and it calls `abort()`."""

_Status = c.c_int8  # ucs_status_t is a packed enum
_Handle = c.c_void_p
_Out = c.POINTER(c.c_void_p)

_PROTOTYPES: Final[tuple[tuple[str, Any, tuple[Any, ...]], ...]] = (
    ("ucp_get_version", None, (c.POINTER(c.c_uint), c.POINTER(c.c_uint), c.POINTER(c.c_uint))),
    ("ucp_config_read", _Status, (c.c_char_p, c.c_char_p, _Out)),
    ("ucp_config_modify", _Status, (_Handle, c.c_char_p, c.c_char_p)),
    ("ucp_config_release", None, (_Handle,)),
    ("ucp_init_version", _Status, (c.c_uint, c.c_uint, c.POINTER(ContextParams), _Handle, _Out)),
    ("ucp_cleanup", None, (_Handle,)),
    ("ucp_worker_create", _Status, (_Handle, c.POINTER(WorkerParams), _Out)),
    ("ucp_worker_destroy", None, (_Handle,)),
    ("ucp_worker_get_address", _Status, (_Handle, _Out, c.POINTER(c.c_size_t))),
    ("ucp_worker_release_address", None, (_Handle, c.c_void_p)),
    ("ucp_worker_get_efd", _Status, (_Handle, c.POINTER(c.c_int))),
    ("ucp_worker_arm", _Status, (_Handle,)),
    ("ucp_worker_progress", c.c_uint, (_Handle,)),
    ("ucp_mem_map", _Status, (_Handle, c.POINTER(MemMapParams), _Out)),
    ("ucp_mem_unmap", _Status, (_Handle, _Handle)),
    ("ucp_rkey_pack", _Status, (_Handle, _Handle, _Out, c.POINTER(c.c_size_t))),
    ("ucp_rkey_buffer_release", None, (c.c_void_p,)),
    ("ucp_ep_create", _Status, (_Handle, c.POINTER(EndpointParams), _Out)),
    ("ucp_ep_close_nbx", c.c_void_p, (_Handle, c.POINTER(RequestParam))),
    ("ucp_ep_flush_nbx", c.c_void_p, (_Handle, c.POINTER(RequestParam))),
    ("ucp_ep_rkey_unpack", _Status, (_Handle, c.c_char_p, _Out)),
    ("ucp_rkey_destroy", None, (_Handle,)),
    ("ucp_get_nbx", c.c_void_p, (_Handle, c.c_void_p, c.c_size_t, c.c_uint64, _Handle, c.POINTER(RequestParam))),
    ("ucp_put_nbx", c.c_void_p, (_Handle, c.c_void_p, c.c_size_t, c.c_uint64, _Handle, c.POINTER(RequestParam))),
    ("ucp_request_check_status", _Status, (c.c_void_p,)),
    ("ucp_request_free", None, (c.c_void_p,)),
)

# Newer than the rest; where the library lacks it, we don't know which transport an endpoint took, and say so.
_OPTIONAL: Final[tuple[tuple[str, Any, tuple[Any, ...]], ...]] = (("ucp_ep_query", _Status, (_Handle, c.POINTER(EndpointAttr))),)


def declare(library: c.CDLL) -> None:
    """Set the prototypes on a loaded libucp. Raises `AttributeError` naming a function it lacks."""
    for name, result, arguments in (*_PROTOTYPES, *(entry for entry in _OPTIONAL if hasattr(library, entry[0]))):
        function = getattr(library, name)
        function.restype, function.argtypes = result, list(arguments)


def pointer_status(pointer: int | None) -> int:
    """The status inside a returned `ucs_status_ptr_t`: `OK`, an error below zero, or `IN_PROGRESS` when it is a request."""
    if not pointer:
        return OK
    signed = pointer - (1 << 64)
    return signed if signed >= ERR_LAST else IN_PROGRESS


def status_text(status: int) -> str:
    """UCX's own words for `status` where they are known here, with the number."""
    return f"{_TEXTS.get(status, 'error')} ({status})"


_TEXTS: Final = {
    -1: "no pending message", -2: "no resources available", -3: "input/output error", -4: "out of memory", -5: "invalid parameter",
    -6: "destination is unreachable", -7: "address not valid", -8: "function not implemented", -12: "no such element",
    -14: "no such device", -15: "device is busy", -16: "request canceled", -20: "operation timed out", -22: "unsupported operation",
    -24: "not connected", -25: "connection reset by remote peer", -80: "endpoint timeout",
}  # fmt: skip
