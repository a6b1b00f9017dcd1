"""Jobs between the rows of a host memory and the pool, in threads: what a scheduler that may not wait begins, and asks about later.

Loads and stores have threads of their own, so that a load, for which a request waits, never stands behind stores.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from kvpool.client.arrays import Bytes
from kvpool.client.values import ValueClient
from kvpool.errors import ClosedError, KvpoolError

log = logging.getLogger(__name__)


class Finished(NamedTuple):
    """A job that has ended: which of its `keys` went well, and how long it took, waiting for a thread included."""

    job_id: int
    load: bool
    keys: Sequence[bytes]
    good: Sequence[bool]
    took_s: float


class Jobs:
    """Over `client`, which stays the caller's, and `rows`, uint8 `[chunks, bytes]`. One thread begins jobs and asks for them."""

    def __init__(self, client: ValueClient, rows: Bytes, *, load_threads: int, store_threads: int, ttl_s: float = 0.0) -> None:
        self._client = client
        self._rows = rows
        self._ttl_s = ttl_s
        self._loads = ThreadPoolExecutor(load_threads, thread_name_prefix="kvpool-loads")
        self._stores = ThreadPoolExecutor(store_threads, thread_name_prefix="kvpool-stores")
        self._running: set[Future[None]] = set()
        self._finished: deque[Finished] = deque()

    def load(self, job_id: int, keys: Sequence[bytes], chunks: Sequence[int]) -> None:
        """Begin to fill the rows `chunks` with the values of `keys`."""
        self._begin(self._loads, job_id, keys, chunks, load=True)

    def store(self, job_id: int, keys: Sequence[bytes], chunks: Sequence[int]) -> None:
        """Begin to put the rows `chunks` as the values of `keys`."""
        self._begin(self._stores, job_id, keys, chunks, load=False)

    def finished(self) -> list[Finished]:
        """The jobs that have ended since the last call."""
        ended: list[Finished] = []
        while self._finished:
            ended.append(self._finished.popleft())
        return ended

    def drain(self) -> None:
        """Wait until no job touches the rows any more; each ends by the client's deadline once it has a thread."""
        wait(self._running)

    def close(self) -> None:
        """Drop what hasn't begun, and wait for what has."""
        for threads in (self._loads, self._stores):
            threads.shutdown(wait=True, cancel_futures=True)

    def _begin(self, threads: ThreadPoolExecutor, job_id: int, keys: Sequence[bytes], chunks: Sequence[int], *, load: bool) -> None:
        began_ns = time.monotonic_ns()
        rows = [self._rows[chunk] for chunk in chunks]

        def work() -> None:
            good: Sequence[bool] = [False] * len(keys)
            try:
                good = self._client.get(keys, rows) if load else self._client.put(keys, rows, ttl_s=self._ttl_s)
            except KvpoolError:
                log.exception("job %d failed", job_id)
            finally:
                self._finished.append(Finished(job_id, load, keys, good, (time.monotonic_ns() - began_ns) / 1e9))

        try:
            future = threads.submit(work)
        except RuntimeError as error:  # its threads have ended
            raise ClosedError("this tier was shut down") from error
        self._running = {one for one in self._running if not one.done()} | {future}
