"""The bytes of one group on their way to the disk, through staging buffers.

Theory. Data come in rising order and are copied into a staging buffer; a full buffer is sent off in a lane while the next one is filled.
What shares pages with the header stays in the header's own buffer, which goes last."""

import errno
from concurrent.futures import Future

from kvpool.clock import Clock
from kvpool.tier.pages import Bytes
from kvpool.tier.ssd.disk import PAGE, Disk, Piece
from kvpool.tier.ssd.format import up
from kvpool.tier.ssd.lanes import STAGE_BYTES, Lanes, patience


class Stream:
    """The bytes of one group on their way: `put` in rising order, `finish`, `wait`. After a failure nothing more is written."""

    def __init__(self, disk: Disk, lanes: Lanes, clock: Clock, name: str, start: int, head: Bytes) -> None:
        self._disk, self._lanes, self._clock, self._name, self._start = disk, lanes, clock, name, start
        self._head = head
        self._head[:] = 0
        self._stage: Bytes | None = None
        self._base = self._at = head.size
        self._running: list[Future[int]] = []
        self._failure = 0

    @property
    def failed(self) -> bool:
        """Whether something went wrong so far."""
        return bool(self._failure)

    def put(self, at: int, data: Bytes, deadline_ns: int) -> bool:
        """Copy `data` to byte `at` of the group, writing buffers as they fill up."""
        done = 0
        if at < self._head.size:
            done = min(data.size, self._head.size - at)
            self._head[at : at + done] = data[:done]
            at += done
        while done < data.size:
            stage = self._staged(at, deadline_ns)
            if stage is None:
                return False
            count = min(data.size - done, self._base + STAGE_BYTES - at)
            stage[at - self._base : at - self._base + count] = data[done : done + count]
            done += count
            at = self._at = at + count
            if at == self._base + STAGE_BYTES:
                self._flush(STAGE_BYTES)
        return True

    def finish(self, header: bytes, deadline_ns: int) -> None:
        """Write what is left, and the header."""
        if self._stage is not None:
            size = up(self._at, PAGE) - self._base
            self._stage[self._at - self._base : size] = 0
            self._flush(size)
        if self._failure or self._clock.now_ns() >= deadline_ns:
            self._failure = self._failure or errno.ETIMEDOUT
            return
        self._head[: len(header)] = memoryview(header)
        self.write(self._start, self._head)

    def wait(self) -> int:
        """When all transfers have ended: the first errno."""
        if self._stage is not None:
            self._lanes.give(self._stage)
            self._stage = None
        codes = [future.result() for future in self._running]
        return self._failure or next((code for code in codes if code), 0)

    def _staged(self, at: int, deadline_ns: int) -> Bytes | None:
        """The buffer that takes byte `at`, with zeros in the gap before it; buffers before it are written."""
        while self._stage is not None and at >= self._base + STAGE_BYTES:
            self._stage[self._at - self._base :] = 0
            self._flush(STAGE_BYTES)
        if self._stage is None:
            if self._failure or self._clock.now_ns() >= deadline_ns:
                self._failure = self._failure or errno.ETIMEDOUT
                return None
            self._stage = self._lanes.take(patience(self._clock, deadline_ns))
            if self._stage is None:
                self._failure = errno.ETIMEDOUT
                return None
        self._stage[self._at - self._base : at - self._base] = 0
        return self._stage

    def _flush(self, size: int) -> None:
        """Send the first `size` bytes of the buffer off; the next one goes behind them."""
        stage, offset = self._stage, self._start + self._base
        assert stage is not None
        self._stage = None
        self._base += size
        self._at = max(self._at, self._base)

        def work() -> int:
            try:
                return self._disk.write([Piece(self._name, offset, stage[:size])])[0]
            finally:
                self._lanes.give(stage)

        self._running.append(self._lanes.start(work))

    def write(self, offset: int, data: Bytes) -> None:
        """Write whole pages at `offset` of the file, unless something failed."""
        if self._failure:
            return
        self._running.append(self._lanes.start(lambda: self._disk.write([Piece(self._name, offset, data)])[0]))
