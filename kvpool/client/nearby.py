"""A synchronous client's calls in the caller's own thread, where the event loop takes no part: to nodes of this host, and by key.

Each call says how far it came. The rest is for the event loop, by whatever way there is.
"""

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from kvpool.block import BlockKey, Framer
from kvpool.client import reading, writing
from kvpool.client.core import Core
from kvpool.client.elsewhere import Elsewhere
from kvpool.client.here import Limits, Rows
from kvpool.client.putting import Write, copying, put_here
from kvpool.client.views import View, view_of
from kvpool.client.writing import Wish, batch_of, home_of
from kvpool.transport.reach import Bytes
from kvpool.units import SECOND


class Nearby:
    """Over the nodes that `core`, on the event loop `loop`, is connected to. Each call ends within `timeout_s`."""

    def __init__(self, core: Core, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        self._core = core
        self._loop = loop
        self._elsewhere = Elsewhere(core, loop)
        self._timeout_ns = int(timeout_s * SECOND)

    def of_values(self, framer: Framer) -> "Nearby":
        """The same for values of one size, which stand each for itself: see `Core.of_values`."""
        return Nearby(self._core.of_values(framer), self._loop, self._timeout_ns / SECOND)

    @property
    def core(self) -> Core:
        """What it is over."""
        return self._core

    @property
    def any(self) -> bool:
        """Whether there is a node of this host."""
        return bool(self._core.links.locals)

    def present(self, chain: Sequence[BlockKey]) -> list[bool]:
        """Which blocks are known to be there."""
        core = self._core
        if core.links.locals and core.here.leading(chain) == len(chain):
            return [True] * len(chain)
        present = core.here.present(chain) if core.links.locals else [False] * len(chain)
        missing = [j for j, there in enumerate(present) if not there] if any(present) else range(len(present))
        found = self._elsewhere.probe(chain, missing, self._limits().deadline_ns)
        if len(found) == len(chain):
            return [True] * len(chain)
        for j in found:
            present[j] = True
        return present

    async def present_rest(self, chain: Sequence[BlockKey], present: list[bool]) -> list[bool]:
        """Which blocks there are, on the event loop, as `reading.present`; `present` are known to be."""
        return await reading.present(self._core, chain, self._limits().deadline_ns, present)

    async def leading(self, chain: Sequence[BlockKey], present: list[bool]) -> int:
        """How many leading blocks there are, on the event loop; `present` are known to be."""
        return await reading.lookup(self._core, chain, self._limits().deadline_ns, present)

    def read(self, chain: Sequence[BlockKey], rows: Rows) -> bytearray:
        """Fill `rows`, uint8 `[payload bytes]` each, with the whole blocks of `chain`; a byte a block, 1 where it has come."""
        core, limits, counts = self._core, self._limits(), [self._core.block_tokens] * len(chain)
        got = core.here.read(chain, counts, rows, limits) if core.links.locals else bytearray(len(chain))
        missing = [j for j, came in enumerate(got) if not came]
        for j in self._elsewhere.fetch(chain, rows, missing, limits.deadline_ns) if missing else ():
            got[j] = 1
        return got

    async def read_rest(self, chain: Sequence[BlockKey], rows: Rows, got: bytearray) -> int:
        """Fill the rows that `got` lacks, on the event loop, and note in `got` which came; the length of the leading run then."""
        counts = [self._core.block_tokens] * len(got)
        return await reading.load_into(self._core, chain, 0, counts, list(rows[: len(got)]), self._limits().deadline_ns, got)

    def write(self, chain: Sequence[BlockKey], rows: Rows, wish: Wish) -> bool:
        """Make the whole blocks of `chain` present; False when they don't all belong to one node here, or it has no room just now."""
        return self.write_by(chain, copying(self._core.framer, rows), wish, shared=True)

    def write_by(self, chain: Sequence[BlockKey], write: Write, wish: Wish, *, shared: bool = False) -> bool:
        """The same by what writes each payload; `shared`: from two threads at once, in any order, if that is faster."""
        core = self._core
        if not core.links.locals or not core.links.nodes() or not chain:
            return False
        placed, _ = core.placed(chain, 0, len(chain))
        home = home_of(core, placed)
        if home is None:
            return False
        batch = batch_of(core, chain, range(len(chain)), [core.block_tokens] * len(chain), wish, write, lacking_only=False)
        return put_here(home, batch._replace(shared=shared), self._limits())

    def write_each(self, chain: Sequence[BlockKey], rows: Rows, wish: Wish) -> list[bool]:
        """Make blocks present where each belongs to one node here alone, a batch a node; which are present by that."""
        core, done = self._core, [False] * len(chain)
        if not core.links.locals or not core.links.nodes():
            return done
        groups: dict[tuple[str, ...], list[int]] = {}
        placed, _ = core.placed(chain, 0, len(chain))
        for j, one in enumerate(placed):
            groups.setdefault(one.targets, []).append(j)
        for some in groups.values():
            home = home_of(core, [placed[some[0]]])
            if home is None:
                continue
            write = copying(core.framer, [rows[j] for j in some])
            batch = batch_of(core, chain, some, [core.block_tokens] * len(some), wish, write, lacking_only=False)
            if put_here(home, batch._replace(shared=True), self._limits()):
                for j in some:
                    done[j] = True
        return done

    async def write_rest(self, chain: Sequence[BlockKey], rows: Rows, wish: Wish) -> Sequence[bool]:
        """Make blocks present wherever they belong, on the event loop; which are."""

        def fill(j: int, payload: Bytes) -> None:
            np.copyto(payload, rows[j])

        counts = [self._core.block_tokens] * len(chain)
        stored = await writing.store(self._core, chain, 0, counts, fill, deadline_ns=self._limits().deadline_ns, wish=wish)
        return stored.has

    def view(self, chain: Sequence[BlockKey]) -> View:
        """A view of the leading blocks of `chain` that are here."""
        return view_of(self._core.here, self._core.namespace.geometry, chain)

    def _limits(self) -> Limits:
        return Limits(time.monotonic_ns() + self._timeout_ns)
