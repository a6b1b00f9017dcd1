"""The twin of a CUDA device: memory that is numpy arrays, and copies that are only made when they are waited for.

So whoever forgets to wait, or lets go of bytes before, finds the wrong ones.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.transport.device import Rows
from kvpool.transport.reach import Bytes


class TwinTensor:
    """What a torch tensor on a GPU shows of itself. `dtype` as torch calls it, without `torch.`; by default as numpy calls it."""

    is_cuda = True

    def __init__(self, memory: npt.NDArray[Any], dtype: str = "", device: str = "cuda:0") -> None:
        self.memory = memory
        self.dtype = f"torch.{dtype or memory.dtype}"
        self.shape = memory.shape
        self.device = device

    def is_contiguous(self) -> bool:
        """Whether it lies in one piece, in order."""
        return self.memory.flags.c_contiguous

    def __getitem__(self, some: slice) -> "TwinTensor":
        return TwinTensor(self.memory[some], self.dtype.removeprefix("torch."), self.device)


class DeviceTwin:
    """`Device`, and what was asked of it: `steps`, and what is `locked`, bytes by address.

    `refusal`: why no memory can be page-locked. `busy`: what the caller has queued never ends. `amid`: called once while copies run.
    """

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.locked: dict[int, int] = {}
        self.refusal = ""
        self.busy = False
        self.amid: Callable[[], None] | None = None
        self._begun: list[tuple[Bytes, Bytes]] = []
        self._lock = threading.Lock()

    def rows(self, blocks: Any, row_bytes: int) -> Rows:
        """See `Device`."""
        return blocks.memory.reshape(-1).view(np.uint8).reshape(-1, row_bytes)

    def settled(self, deadline_ns: int) -> bool:
        """See `Device`."""
        self.steps.append("settled")
        return not self.busy

    def to_device(self, rows: Rows, sources: Sequence[Bytes]) -> None:
        """See `Device`."""
        self.steps.append(f"to device: {len(sources)}")
        with self._lock:
            self._begun += zip(rows, sources, strict=True)

    def to_host(self, target: Bytes, row: Any) -> None:
        """See `Device`."""
        self.steps.append("to host")
        with self._lock:
            self._begun.append((target, row))

    def wait(self) -> None:
        """See `Device`."""
        amid, self.amid = self.amid, None
        if amid is not None:
            amid()
        with self._lock:
            begun, self._begun = self._begun, []
        for target, source in begun:
            target[:] = source
        self.steps.append("wait")

    def page_locked(self, nbytes: int) -> Bytes:
        """See `Device`."""
        self.steps.append(f"buffer of {nbytes}")
        return np.zeros(nbytes, np.uint8)

    def register(self, address: int, nbytes: int) -> str:
        """See `Device`."""
        self.steps.append("register")
        if not self.refusal:
            assert address not in self.locked, "locked twice"
            self.locked[address] = nbytes
        return self.refusal

    def unregister(self, address: int) -> None:
        """See `Device`."""
        self.steps.append("unregister")
        del self.locked[address]
