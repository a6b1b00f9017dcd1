"""Blocks of nodes elsewhere that answer keys, for a synchronous caller: asked in its own thread, so that no event loop takes part.

It is asked this way only when all blocks that are wanted would first be asked for by key, over connections that are open. One node is asked
in the caller's thread, the others at the same time in threads of the client. Nodes are judged as by `direct.py`: on the event loop, which
keeps those books, and before it goes on with whatever wasn't found this way.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from kvpool.block import BlockKey
from kvpool.client.core import Core
from kvpool.client.keyed import Asked, Keyed, Targets, blame
from kvpool.client.reading import holders_of
from kvpool.errors import ClosedError, ConfigError, RemoteError

T = TypeVar("T")


class Elsewhere:
    """The other hosts' nodes of `core`, whose event loop is `loop`. For any thread but the loop's."""

    def __init__(self, core: Core, loop: asyncio.AbstractEventLoop) -> None:
        self._core = core
        self._loop = loop

    def probe(self, chain: Sequence[BlockKey], positions: Sequence[int], deadline_ns: int) -> list[int]:
        """Those of the blocks at `positions` that are there."""
        keyed, asked = self._asked(chain, positions, near=False)
        found: list[int] = []
        for one, answer in zip(asked, self._each(asked, keyed.probe, deadline_ns), strict=True):
            if answer is not None:
                found += [j for j, there in zip(one.positions, answer, strict=True) if there] if b"\0" in answer else one.positions
        return found

    def fetch(self, chain: Sequence[BlockKey], targets: Targets, positions: Sequence[int], deadline_ns: int) -> list[int]:
        """Fill the targets at `positions` with whole blocks, as far as they are there; which ones."""
        keyed, asked = self._asked(chain, positions, near=self._core.links.config.near_copies)

        def get(one: Asked, until_ns: int) -> list[int]:
            return keyed.get(one, targets, until_ns)

        came = [j for answer in self._each(asked, get, deadline_ns) for j in answer or ()]
        if came:
            self._core.direct.add("hits", len(came))
        return came

    def _asked(self, chain: Sequence[BlockKey], positions: Sequence[int], *, near: bool) -> tuple[Keyed, list[Asked]]:
        """Who is to be asked; nobody unless all of these blocks can be asked for by key."""
        core = self._core
        placed, refs = core.placed(chain, 0, len(chain)) if core.links.nodes() else ([], {})
        keyed = Keyed(core, holders_of(core, placed, refs, near=near), refs, chain, [core.block_tokens] * len(chain))
        asked = keyed.asked(positions) if placed else []
        return keyed, asked if sum(len(one.positions) for one in asked) == len(positions) else []

    def _each(self, asked: Sequence[Asked], work: Callable[[Asked, int], T], deadline_ns: int) -> list[T | None]:
        """What each node answers, None from those that fail. All have ended when this does."""
        others: list[Future[T | None]] = []
        try:
            others += (self._begin(one, work, deadline_ns) for one in asked[1:])
            first = [self._ask(one, work, deadline_ns) for one in asked[:1]]
        finally:
            if others:
                wait(others)  # each ends by its deadline
        return first + [other.result() for other in others]

    def _begin(self, one: Asked, work: Callable[[Asked, int], T], deadline_ns: int) -> "Future[T | None]":
        try:
            return self._core.threads.submit(self._ask, one, work, deadline_ns)
        except RuntimeError as error:  # its threads have ended
            raise ClosedError("this client was closed") from error

    def _ask(self, one: Asked, work: Callable[[Asked, int], T], deadline_ns: int) -> T | None:
        try:
            result = work(one, min(deadline_ns, one.fair_ns))
        except (RemoteError, ClosedError, ConfigError) as error:
            self._on_loop(partial(self._blame, one, error, deadline_ns))
            return None
        health, ref = self._core.links.health, one.link.node
        if health.doubted(ref):
            self._on_loop(partial(health.well, ref, "data"))
        return result

    def _blame(self, one: Asked, error: RemoteError | ClosedError | ConfigError, deadline_ns: int) -> None:
        self._core.background.spawn(blame(self._core, one, error, deadline_ns))

    def _on_loop(self, call: Callable[[], None]) -> None:
        if not self._core.closed:
            self._loop.call_soon_threadsafe(call)
