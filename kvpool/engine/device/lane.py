"""Copies between the host and a device in one direction: a stream and the buffers they go through.

Theory. The copy engine reads and writes host memory by itself only where pages are locked, and it moves one piece at a time, where a block
lies in many (a row for each layer and head). So a block goes through a *slot*: page-locked memory, and as much memory on the device, where
the payload is in one piece. One copy moves it between the two, and one kernel for keys and one for values moves it between there and its
place. A slot is used again when its last copy is done.
"""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from kvpool.engine.device.streams import WAIT_S, Device, Event, Stream, wait_for
from kvpool.errors import LocalError

SLOTS: Final = 8
"""Blocks on their way at once; more wait for a slot."""


class Slot:
    """`host` and `there` are uint8 ``[bytes of a block]``; `done` is behind the last copy that went through."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.host = device.page_locked(nbytes)
        self.there = torch.empty(nbytes, dtype=torch.uint8, device=device.place)
        self.done: Event | None = None


class Lane:
    """`slots` slots of `nbytes` and their stream. For any thread."""

    def __init__(self, device: Device, nbytes: int, slots: int = SLOTS) -> None:
        self.stream: Stream = device.stream()
        self._free: queue.Queue[Slot] = queue.Queue()
        for _ in range(slots):
            self._free.put(Slot(device, nbytes))

    @contextmanager
    def slot(self, wait_s: float = WAIT_S) -> Iterator[Slot]:
        """A slot that nothing else uses. Raises `LocalError` when there is none for `wait_s` seconds."""
        try:
            slot = self._free.get(timeout=wait_s)
        except queue.Empty:
            raise LocalError(f"no copy to or from the device ended in {wait_s:g} s; it is stuck") from None
        try:
            if slot.done is not None:
                wait_for(slot.done, wait_s)
            yield slot
        finally:
            self._free.put(slot)
