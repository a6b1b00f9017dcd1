"""What `kvpool record` takes home: one line for each request that has ended, in the form of `kvpool.replay.traces.own`.

A recording draws a secret when it begins and keeps it nowhere. With it go into a hash: whose blocks they are (the tenant's salt), and then
block by block the tokens, each on top of the one before. So equal prefixes of one tenant are equal in the file, and nothing in it can be
compared with another recording, with the keys of the pool, or with a text that somebody guesses.

Requests are noted as they end and hashed on another thread; a recording that falls behind loses requests, counts them and says so.
"""

import asyncio
import hashlib
import logging
import secrets
import struct
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvpool.errors import ConfigError
from kvpool.replay.traces import own
from router.job import Job, Trace

log = logging.getLogger("router.recorder")

BLOCK_TOKENS = 16
MAX_WAITING = 1024
"""Requests that one recording may be behind."""
MAX_RECORDINGS = 8
IDLE_S = 15.0
_HASH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A request that is over. Holds its prompt until it is hashed."""

    job: Job
    arrived_ns: int
    output_tokens: int
    cached_tokens: int
    first_token_ns: int
    total_ns: int
    outcome: str


class Recorder:
    """The recordings under way of one router."""

    def __init__(self) -> None:
        self._recordings: set[Recording] = set()

    def ended(self, job: Job, trace: Trace, outcome: str) -> None:
        """`job` is over; costs nothing when nobody records."""
        if not self._recordings:
            return
        entry = Ended(
            job=job,
            arrived_ns=trace.arrived_ns,
            output_tokens=len(trace.generated),
            cached_tokens=trace.cached_tokens,
            first_token_ns=trace.first_token_ns,
            total_ns=trace.total_ns,
            outcome=outcome,
        )
        for recording in self._recordings:
            recording.add(entry)

    @property
    def full(self) -> bool:
        """Whether as many record as may."""
        return len(self._recordings) >= MAX_RECORDINGS

    async def lines(self, model: str, now_ns: int) -> AsyncGenerator[str, None]:
        """A recording that begins at `now_ns`, line by line, each with its end; until it is closed, or the recorder is."""
        recording = Recording(model, now_ns)
        self._recordings.add(recording)
        try:
            async for line in recording.lines():
                yield line
        finally:
            self._recordings.discard(recording)

    @asynccontextmanager
    async def written(self, path: Path | None, model: str, now_ns: int) -> AsyncIterator[None]:
        """Record into a new file at `path` (None: not at all) for the length of the block. Raises `ConfigError` when it can't be made.

        A file that can't be written any more ends the recording, with a line in the log; requests are served all the same.
        """
        if path is None:
            yield
            return
        try:
            file = await asyncio.to_thread(path.open, "x")
        except OSError as error:
            raise ConfigError(f"can't record into {path}: {error}; --record takes a file that isn't there yet") from error
        writing = asyncio.ensure_future(self._write(file, path, model, now_ns))
        try:
            yield
        finally:
            self.close()
            await asyncio.wait({writing})

    async def _write(self, file: IO[str], path: Path, model: str, now_ns: int) -> None:
        with file:
            try:
                async with aclosing(self.lines(model, now_ns)) as lines:
                    async for line in lines:
                        if line.strip():
                            await asyncio.to_thread(_put, file, line)
            except OSError as error:
                log.error("the recording into %s has ended: %s", path, error)

    def close(self) -> None:
        """End all recordings once they have written what they hold."""
        for recording in self._recordings:
            recording.close()


class Recording:
    """One recording."""

    def __init__(self, model: str, began_ns: int) -> None:
        self._model = model
        self._began_ns = began_ns
        self._secret = secrets.token_bytes(32)
        self._waiting: deque[Ended] = deque()
        self._changed = asyncio.Event()
        self._closed = False
        self._lost = 0

    def add(self, entry: Ended) -> None:
        """Note a request that is over; those that began before the recording don't count."""
        if entry.arrived_ns < self._began_ns:
            return
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(entry)
        else:
            self._lost += 1
        self._changed.set()

    def close(self) -> None:
        """Let `lines` end."""
        self._closed = True
        self._changed.set()

    async def lines(self) -> AsyncIterator[str]:
        """The lines of the file, each with its end; an empty one when there has been nothing for `IDLE_S`."""
        yield own.spell_header(BLOCK_TOKENS, self._model) + "\n"
        while True:
            self._changed.clear()
            if self._waiting:
                yield await asyncio.to_thread(self._spell, self._waiting.popleft())
            elif self._lost:
                lost, self._lost = self._lost, 0
                yield own.spell({"lost": lost}) + "\n"
            elif self._closed:
                return
            else:
                try:
                    async with asyncio.timeout(IDLE_S):
                        await self._changed.wait()
                except TimeoutError:
                    yield "\n"

    def _spell(self, entry: Ended) -> str:
        job = entry.job
        fields = {
            "at_ms": round((entry.arrived_ns - self._began_ns) / 1e6, 3),
            "input": len(job.prompt),
            "output": entry.output_tokens,
            "blocks": block_hashes(self._secret, job.scope.salt, job.prompt),
            "session": self._label("session", job.scope.tenant, job.session),
            "tenant": self._label("tenant", job.scope.tenant),
            "cached": entry.cached_tokens,
            "ttft_ms": round(entry.first_token_ns / 1e6, 3) if entry.first_token_ns else None,
            "total_ms": round(entry.total_ns / 1e6, 3),
            "outcome": entry.outcome,
        }
        return own.spell({name: value for name, value in fields.items() if value not in (None, "")}) + "\n"

    def _label(self, kind: str, *parts: str) -> str:
        """A name for `parts` that means nothing elsewhere; "" when the last of them is empty."""
        if not parts[-1]:
            return ""
        return hashlib.blake2b("\0".join((kind, *parts)).encode(), key=self._secret, digest_size=_HASH_BYTES).hexdigest()


def _put(file: IO[str], line: str) -> None:
    file.write(line)
    file.flush()


def block_hashes(secret: bytes, salt: bytes, prompt: tuple[int, ...]) -> list[str]:
    """A hash for each block of `prompt`, the partial last one included; each is on top of those before it."""
    parent, hashes = salt, []
    for start in range(0, len(prompt), BLOCK_TOKENS):
        block = prompt[start : start + BLOCK_TOKENS]
        parent = hashlib.blake2b(parent + struct.pack(f"<{len(block)}I", *block), key=secret, digest_size=32).digest()
        hashes.append(parent[:_HASH_BYTES].hex())
    return hashes
