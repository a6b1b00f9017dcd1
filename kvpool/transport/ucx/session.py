"""One UCP context with one worker: what both ends are made of.

Settings go in through `ucp_config_modify`, so a process's environment (and its children's) stays as it was; other `UCX_*` variables,
such as `UCX_NET_DEVICES`, are honoured. Shared memory transports are left out: with them a dead peer aborts the *caller* (CMA) or makes
it wait for ever (posix, sysv), and a process on the same host has the `shm` reach. A TCP segment takes `MESSAGE_BYTES` and UCX's header:
with UCX's own 8 and 64 KiB a get of 1 MiB takes three times as long, and lanes rely on one message being one segment (see `lane.py`).

Before 1.19 UCX has the target's CPU answer gets over RDMA, too, in messages smaller than ours, which is what `lane.py` avoids. So such a
UCX is used over TCP only.

A session is used by one thread at a time; its owner sees to that.
"""

import ctypes
import os
from dataclasses import dataclass
from typing import Final

from kvpool.errors import ConfigError
from kvpool.transport.ucx import api
from kvpool.transport.ucx.drain import make_drain
from kvpool.transport.ucx.library import UcpLibrary, api_version, load_ucp
from kvpool.units import KIB, MIB

TRANSPORTS_VARIABLE: Final = "KVPOOL_UCX_TLS"
_NO_SHARED_MEMORY: Final = "^sm"
MESSAGE_BYTES: Final = MIB
_RDMA_SINCE: Final = (1, 19)
_TCP: Final = "tcp,self"
_RDMA: Final = ("all", "ib", "rc", "ud", "dc")
_SEGMENT: Final = f"{(MESSAGE_BYTES + 64 * KIB) // KIB}k"


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxSettings:
    """How to set up UCX: `library` (None: find one); `transports`, as `UCX_TLS` takes them; `lanes` to a node where TCP is all there is."""

    library: str | None = None
    transports: str = _NO_SHARED_MEMORY
    lanes: int = 2

    @staticmethod
    def from_environment() -> "UcxSettings":
        """The defaults, with the transports of the variable `KVPOOL_UCX_TLS` where it is set."""
        return UcxSettings(transports=os.environ.get(TRANSPORTS_VARIABLE) or _NO_SHARED_MEMORY)


class UcpSession:
    """A context and its worker. Raises `ConfigError` when UCX can't be set up on this machine."""

    def __init__(self, settings: UcxSettings) -> None:
        self.library: UcpLibrary = load_ucp(settings.library)
        self.calls = self.library.calls
        self._process = os.getpid()
        self.context = self._make_context(settings)
        try:
            self.worker = self._make_worker()
        except ConfigError:
            self.calls.ucp_cleanup(self.context)
            raise
        self.progress = make_drain(self.calls, self.worker)  # moves what can be moved now, without waiting; False: nothing to do
        descriptor = ctypes.c_int(-1)
        status = self.calls.ucp_worker_get_efd(self.worker, ctypes.byref(descriptor))
        if status != api.OK:
            self.destroy()
            raise ConfigError(f"UCX has no wake-up with these transports: {api.status_text(status)}; set {TRANSPORTS_VARIABLE}=tcp,self")
        self.descriptor: int = descriptor.value

    def arm(self) -> bool:
        """Make `descriptor` readable on the next event. False: there are events already, progress first. Raises `ConfigError`."""
        status = self.calls.ucp_worker_arm(self.worker)
        if status not in (api.OK, api.ERR_BUSY):
            raise ConfigError(
                f"UCX can't wait for events with these transports: {api.status_text(status)}; set {TRANSPORTS_VARIABLE}=tcp,self"
            )
        return bool(status == api.OK)

    def destroy(self) -> None:
        """Free worker and context; only once, with no endpoint open. In a forked child nothing is done: it is the parent's."""
        if os.getpid() != self._process:
            return
        self.calls.ucp_worker_destroy(self.worker)
        self.calls.ucp_cleanup(self.context)

    def _make_context(self, settings: UcxSettings) -> int:
        config = ctypes.c_void_p()
        self._require(self.calls.ucp_config_read(None, None, ctypes.byref(config)), "read its configuration")
        try:
            transports = usable_transports(settings.transports, self.library.version)
            for name, value in (("TLS", transports), ("TCP_TX_SEG_SIZE", _SEGMENT), ("TCP_RX_SEG_SIZE", _SEGMENT)):
                self._require(self.calls.ucp_config_modify(config, name.encode(), value.encode()), f"take {name}={value}")
            parameters = api.ContextParams(
                field_mask=api.PARAM_FEATURES | api.PARAM_NAME, features=api.FEATURE_RMA | api.FEATURE_WAKEUP, name=b"kvpool"
            )
            context = ctypes.c_void_p()
            status = self.calls.ucp_init_version(*api_version(self.library), ctypes.byref(parameters), config, ctypes.byref(context))
            self._require(status, f"start with transports {transports}")
        finally:
            self.calls.ucp_config_release(config)
        return context.value or 0

    def _make_worker(self) -> int:
        parameters = api.WorkerParams(field_mask=api.WORKER_PARAM_THREAD_MODE, thread_mode=api.THREAD_MODE_SERIALIZED)
        worker = ctypes.c_void_p()
        self._require(self.calls.ucp_worker_create(self.context, ctypes.byref(parameters), ctypes.byref(worker)), "create a worker")
        return worker.value or 0

    def _require(self, status: int, what: str) -> None:
        if status != api.OK:
            raise ConfigError(f"{self.library.text} can't {what}: {api.status_text(status)}")


def usable_transports(wanted: str, version: tuple[int, ...]) -> str:
    """`wanted`, as `UCX_TLS` takes it, without RDMA where this version of UCX can't be trusted with it.

    Raises `ConfigError` when RDMA is asked for by name.
    """
    if version[:2] >= _RDMA_SINCE:
        return wanted
    if wanted.startswith("^"):
        return _TCP  # "^sm,ib" would still let it connect over UD
    if any(name.startswith(_RDMA) for name in wanted.split(",")):
        raise ConfigError(
            f"UCX {'.'.join(map(str, version))} serves gets over RDMA by the node's CPU and may take it down: "
            f"install UCX 1.19 or later, or leave RDMA out of {TRANSPORTS_VARIABLE} ({wanted})"
        )
    return wanted
