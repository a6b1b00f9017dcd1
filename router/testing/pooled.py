"""Workers that share a pool and take the time a computation takes: what is computed, and how often, can be counted.

As real ones they compute one prompt at a time, in the order of arrival, load what the pool or they themselves hold, and publish the rest.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence

from kvpool.block import BlockKey, chain_keys
from kvpool.errors import UnavailableError
from kvpool.request import (
    DecodeEvent,
    DecodeRequest,
    Finished,
    FinishReason,
    FirstToken,
    PrefillEvent,
    PrefillRequest,
    Published,
    StageTimes,
    Started,
    TokenOut,
    TokenSources,
    WorkerStatus,
)
from kvpool.units import SECOND
from router.testing.workers import Fault, status_of


class KeyPool:
    """A `PoolProbe` over a set of keys that workers add to; how often each key was computed."""

    def __init__(self, root: bytes = bytes.fromhex("ab" * 32), block_tokens: int = 4) -> None:
        self.root = root
        self.block_tokens = block_tokens
        self.held: set[BlockKey] = set()
        self.computed: dict[BlockKey, int] = {}

    def keys(self, tokens: Sequence[int]) -> list[BlockKey]:
        """Of the full blocks of a prompt."""
        return chain_keys(self.root, tokens, self.block_tokens)

    async def longest_prefix(self, keys: Sequence[BlockKey], block_tokens: int, timeout_s: float) -> int:
        """See `PoolProbe`."""
        return leading(keys, self.held)

    async def close(self) -> None:
        """See `PoolProbe`."""


class PooledWorker:
    """A `WorkerPort`."""

    def __init__(self, pool: KeyPool, *, token_s: float = 1e-4, load_s: float = 1e-6, step_s: float = 0.01) -> None:
        """Seconds to compute a token of prompt, to load one, and between two tokens of an answer."""
        self.pool = pool
        self.faults: deque[Fault] = deque()
        """One for each coming call, in order: `die` or `hang` before anything is computed."""
        self.answers_status = True
        self.calls: list[str] = []
        self.computed_tokens = 0
        self.running = 0
        self.most_running = 0
        self.closed = False
        self._resident: set[BlockKey] = set()
        self._token_s, self._load_s, self._step_s = token_s, load_s, step_s
        self._turn = asyncio.Lock()

    async def prefill(self, request: PrefillRequest, timeout_s: float) -> AsyncGenerator[PrefillEvent, None]:
        """See `WorkerPort`."""
        with _Counted(self, request.request_id):
            sources, times = await self._fill(request.prompt)
            yield FirstToken(token=self.answer(request.prompt, 0), sources=sources, times=times)
            self.pool.held.update(self.pool.keys(request.prompt))
            yield Published(tokens=len(request.prompt), blocks_written=sources.computed // self.pool.block_tokens)

    async def decode(self, request: DecodeRequest, timeout_s: float) -> AsyncGenerator[DecodeEvent, None]:
        """See `WorkerPort`."""
        with _Counted(self, request.request_id):
            sources, times = await self._fill(request.prompt)
            yield Started(sources=sources, times=times)
            for position in range(len(request.generated), request.max_tokens):
                await asyncio.sleep(self._step_s)
                yield TokenOut(token=self.answer(request.prompt, position))
            self.pool.held.update(self.pool.keys(request.prompt))
            yield Finished(reason=FinishReason.LENGTH)

    async def status(self, timeout_s: float) -> WorkerStatus:
        """See `WorkerPort`; never answers while `answers_status` is false."""
        if not self.answers_status:
            await asyncio.Event().wait()
        return status_of(self.running, prefill_tokens_per_s=1 / self._token_s)

    async def close(self) -> None:
        """See `WorkerPort`."""
        self.closed = True

    @staticmethod
    def answer(prompt: Sequence[int], position: int) -> int:
        """The token at a position, whoever computes it."""
        return 1000 + position

    async def _fill(self, prompt: Sequence[int]) -> tuple[TokenSources, StageTimes]:
        """Load what there is of the prompt and compute the rest, once it is its turn."""
        fault = self.faults.popleft() if self.faults else None
        if fault is not None and fault.kind == "hang":
            await asyncio.Event().wait()
        if fault is not None:
            raise UnavailableError("the worker died")
        async with self._turn:
            keys, size = self.pool.keys(prompt), self.pool.block_tokens
            resident = leading(keys, self._resident)
            held = max(resident, leading(keys, self._resident | self.pool.held))
            missing = len(prompt) - held * size
            await asyncio.sleep(missing * self._token_s + (held - resident) * size * self._load_s)
            for key in keys[held:]:
                self.pool.computed[key] = self.pool.computed.get(key, 0) + 1
            self._resident.update(keys)
            self.computed_tokens += missing
        loaded = (held - resident) * size
        times = StageTimes(compute_ns=int(missing * self._token_s * SECOND), load_ns=int(loaded * self._load_s * SECOND))
        return TokenSources(resident=resident * size, pool=loaded, computed=missing), times


class _Counted:
    """One call on a worker."""

    def __init__(self, worker: PooledWorker, request_id: str) -> None:
        self._worker = worker
        worker.calls.append(request_id)

    def __enter__(self) -> None:
        self._worker.running += 1
        self._worker.most_running = max(self._worker.most_running, self._worker.running)

    def __exit__(self, *exc: object) -> None:
        self._worker.running -= 1


def leading(keys: Sequence[BlockKey], held: set[BlockKey]) -> int:
    """How many leading `keys` are among those held."""
    return next((count for count, key in enumerate(keys) if key not in held), len(keys))
