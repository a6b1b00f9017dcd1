"""A device whose streams run late and in any order that events allow, on CPU tensors: what lacks an event shows as wrong bytes.

Work that is issued waits in its stream. A step takes one stream by chance, of those whose next work waits for nothing, and runs that. Steps
are made only when somebody asks for an event, so everything is as late as it may be. The *main* stream runs at once, as the code that calls
torch without naming a stream can't be made to wait; with `lazy` what is issued to it by name is as late as all else.
"""

import random
import threading
from collections import deque
from collections.abc import Callable

import torch


class TwinEvent:
    """The place behind the first `place` works of `stream`."""

    def __init__(self, stream: "TwinStream", place: int) -> None:
        self.stream = stream
        self._place = place

    @property
    def passed(self) -> bool:
        """Whether it is done, without a step."""
        return self.stream.ran >= self._place

    def done(self) -> bool:
        """A step, unless it is done."""
        with self.stream.device.lock:
            return self.passed or (self.stream.device.step() and self.passed)


class TwinStream:
    """`kvpool.engine.device.streams.Stream`. `deaf`: doesn't wait for events, which is a defect to be found."""

    def __init__(self, device: "TwinDevice", eager: bool) -> None:
        self.device = device
        self.ran = 0
        self.deaf = False
        self._eager = eager
        self._queue: deque[Callable[[], object] | TwinEvent] = deque()

    @property
    def ready(self) -> bool:
        """Whether a step can be made here."""
        return bool(self._queue) and (not isinstance(self._queue[0], TwinEvent) or self._queue[0].passed)

    def step(self) -> None:
        """Run the next work."""
        work = self._queue.popleft()
        self.ran += 1
        if not isinstance(work, TwinEvent):
            with torch.inference_mode():
                work()

    def issue(self, work: Callable[[], object]) -> None:
        """See `Stream.issue`."""
        with self.device.lock:
            self._queue.append(work)
            self._hurry()

    def record(self) -> TwinEvent:
        """See `Stream.record`."""
        with self.device.lock:
            return TwinEvent(self, self.ran + len(self._queue))

    def wait(self, event: TwinEvent) -> None:
        """See `Stream.wait`."""
        if not self.deaf:
            with self.device.lock:
                self._queue.append(event)
                self._hurry()

    def _hurry(self) -> None:
        while self._eager and self._queue:
            self.device.step()


class TwinDevice:
    """`kvpool.engine.device.streams.Device` on the CPU; `seed` decides in which order what may run runs."""

    def __init__(self, seed: int = 0, *, lazy: bool = False) -> None:
        self.place = torch.device("cpu")
        self.lock = threading.RLock()
        self._luck = random.Random(seed)
        self._streams: list[TwinStream] = []
        self.main = self._added(eager=not lazy)

    def stream(self) -> TwinStream:
        """See `Device.stream`."""
        return self._added(eager=False)

    def page_locked(self, nbytes: int) -> torch.Tensor:
        """See `Device.page_locked`: ordinary memory, of bytes that no test expects."""
        return torch.full((nbytes,), 0xA5, dtype=torch.uint8)

    def step(self) -> bool:
        """Run one work of one stream. Raises `AssertionError` when all wait for each other."""
        ready = [stream for stream in self._streams if stream.ready]
        assert ready, "every stream of the device waits for another"
        self._luck.choice(ready).step()
        return True

    def _added(self, *, eager: bool) -> TwinStream:
        self._streams.append(TwinStream(self, eager))
        return self._streams[-1]
