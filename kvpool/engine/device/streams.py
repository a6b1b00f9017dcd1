"""A device's queues of work: what runs on one stream runs in order, what runs on two only as events say.

Theory. Handing work to a device returns before it is done. Three streams are used: *main*, where the model's own calls go; one for loads
and one for stores, so that copies run beside the computation. What must come before what is said with events and nothing else: an event is
recorded on the stream that comes first, and waited for on the other, by the device and not by the caller.

`Device` is small so that a twin can run the same work on CPU tensors as late, and in as odd an order, as events allow
(`kvpool.testing.stream_twin`).
"""

import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

from kvpool.errors import ConfigError, LocalError

WAIT_S: Final = 30.0
"""How long the device may take for what it was given, before it counts as stuck."""
_POLL_S: Final = 50e-6


class Event(Protocol):
    """A place in a stream."""

    def done(self) -> bool:
        """Whether all work before it has run."""
        ...


class Stream(Protocol):
    """A queue of work. For any thread."""

    def issue(self, work: Callable[[], object]) -> None:
        """Queue what `work` does: it calls torch, and what it calls is queued and doesn't wait."""
        ...

    def record(self) -> Event:
        """The place behind all that was issued."""
        ...

    def wait(self, event: Any) -> None:
        """What is issued from now on runs when `event` is done. The caller doesn't wait."""
        ...


class Device(Protocol):
    """Where weights and KV are."""

    place: torch.device

    @property
    def main(self) -> Stream:
        """Where calls go that name no stream."""
        ...

    def stream(self) -> Stream:
        """A new one."""
        ...

    def page_locked(self, nbytes: int) -> torch.Tensor:
        """Host memory, uint8, that the device copies from and to by itself. Raises `ConfigError` when there is none."""
        ...


class _CudaStream:
    """`Stream` over one of torch's, whose own events are `Event` but for the name of `query`."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def issue(self, work: Callable[[], object]) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._raw):
            work()

    def record(self) -> "_CudaEvent":
        return _CudaEvent(self._raw.record_event())

    def wait(self, event: "_CudaEvent") -> None:
        self._raw.wait_event(event.raw)


class _CudaEvent:
    """`Event` over one of torch's."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def done(self) -> bool:
        return bool(self.raw.query())


class CudaDevice:
    """`Device` over torch's CUDA device `name`. Raises `ConfigError` when there is none of that name."""

    def __init__(self, name: str) -> None:
        self.place = torch.device(name)
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (self.place.index or 0) >= seen:
            raise ConfigError(f"there is no {name} here: torch sees {seen} CUDA devices; leave --device out to compute on the CPU")
        self.main: Stream = _CudaStream(torch.cuda.default_stream(self.place))

    def stream(self) -> Stream:
        """See `Device.stream`."""
        made: Any = torch.cuda.Stream
        return _CudaStream(made(self.place))

    def page_locked(self, nbytes: int) -> torch.Tensor:
        """See `Device.page_locked`."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            raise ConfigError(f"no {nbytes} B of page-locked memory to be had: {error}; free some memory") from error


def open_device(name: str) -> Device | None:
    """The device that `--device` names; None is the CPU."""
    return None if name == "cpu" else CudaDevice(name)


def wait_for(event: Event, wait_s: float = WAIT_S) -> None:
    """Return when `event` is done: it is asked, since waiting for one has no limit. Raises `LocalError` after `wait_s` seconds."""
    end = time.monotonic() + wait_s
    while not event.done():
        if time.monotonic() >= end:
            raise LocalError(f"the device did not finish in {wait_s:g} s what it was given")
        time.sleep(_POLL_S)
