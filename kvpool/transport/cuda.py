"""A CUDA device by way of torch: copies on a stream of their own.

`copy_(..., non_blocking=True)` between contiguous bytes is one `cudaMemcpyAsync` (ATen, `native/cuda/Copy.cu`); torch has no binding of
that call itself. Memory is page-locked by `cudaHostRegister`, as torch's `cuda/_pin_memory_utils.py` does it. torch is never imported
from here: who has a CUDA tensor has it loaded.
"""

import logging
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Final

from kvpool.errors import ConfigError
from kvpool.transport.device import Rows
from kvpool.transport.reach import Bytes
from kvpool.units import format_size

log = logging.getLogger(__name__)

_PORTABLE: Final = 1
"""cudaHostRegisterPortable: locked for every device of the process."""
_POLL_S: Final = 50e-6


class Cuda:
    """`Device` over the torch device `device`. Threads share its stream, as they would share the copy engine."""

    def __init__(self, torch: ModuleType | Any, device: Any) -> None:
        self._torch = torch
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)

    def rows(self, blocks: Any, row_bytes: int) -> Rows:
        """See `Device.rows`."""
        return blocks.detach().reshape(-1).view(self._torch.uint8).view(-1, row_bytes)

    def settled(self, deadline_ns: int) -> bool:
        """See `Device.settled`. An event is asked for, since waiting for one has no limit."""
        event = self._torch.cuda.current_stream(self._device).record_event()
        while not event.query():
            if time.monotonic_ns() >= deadline_ns:
                return False
            time.sleep(_POLL_S)
        return True

    def to_device(self, rows: Rows, sources: Sequence[Bytes]) -> None:
        """See `Device.to_device`. Writable sources only: torch warns of others."""
        torch = self._torch
        with torch.inference_mode(), torch.cuda.stream(self._stream):  # tensors made in inference mode are written to nowhere else
            for row, source in zip(rows, sources, strict=True):
                row.copy_(torch.from_numpy(source), non_blocking=True)

    def to_host(self, target: Bytes, row: Any) -> None:
        """See `Device.to_host`."""
        torch = self._torch
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            torch.from_numpy(target).copy_(row, non_blocking=True)

    def wait(self) -> None:
        """See `Device.wait`."""
        self._stream.synchronize()

    def page_locked(self, nbytes: int) -> Bytes:
        """See `Device.page_locked`."""
        try:
            buffer: Bytes = self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True).numpy()
        except RuntimeError as error:
            raise ConfigError(f"no {format_size(nbytes)} of page-locked memory to be had: {error}; free some memory") from error
        return buffer

    def register(self, address: int, nbytes: int) -> str:
        """See `Device.register`."""
        return self._told(lambda cudart: cudart.cudaHostRegister(address, nbytes, _PORTABLE))

    def unregister(self, address: int) -> None:
        """See `Device.unregister`."""
        try:
            reason = self._told(lambda cudart: cudart.cudaHostUnregister(address))
        except RuntimeError as error:
            reason = str(error)
        if reason:
            log.warning("memory stays page-locked on %s: %s", self._device, reason)

    def _told(self, call: Any) -> str:
        """What is wrong with a call of the CUDA runtime, or nothing."""
        torch = self._torch
        with torch.cuda.device(self._device):
            code = int(call(torch.cuda.cudart()))
            if code == 0:
                return ""
            self._clear_error()
            return str(torch.cuda.CudaError(code))

    def _clear_error(self) -> None:
        """A failed call leaves its error for this thread's next kernel to report: here is one that may, so that no other has to."""
        try:
            self._torch.empty(1, dtype=self._torch.uint8, device=self._device).fill_(1)
        except RuntimeError as error:
            log.debug("cleared: %s", error)


def cuda_of(tensor: Any) -> Cuda:
    """The device that a CUDA tensor lies on. Raises `ConfigError` for what isn't torch's."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"blocks on a GPU must be a torch tensor, got {type(tensor).__name__}; torch.from_dlpack(x) makes one")
    return Cuda(torch, tensor.device)
