"""A synchronous client's calls to nodes of this host, in the caller's own thread: the event loop takes no part.

Each call either does all that is asked, or says that it didn't; then the same call on the event loop does it, by whatever way there is.
"""

import time
from collections.abc import Sequence

from kvpool.block import BlockKey
from kvpool.client.core import Core
from kvpool.client.here import Limits
from kvpool.client.putting import Write, copying, put_here
from kvpool.client.views import View, view_of
from kvpool.client.writing import Wish, batch_of, home_of
from kvpool.transport.reach import Bytes
from kvpool.units import SECOND


class Nearby:
    """Over the nodes of this host that `core` is connected to. Each call ends within `timeout_s`."""

    def __init__(self, core: Core, timeout_s: float) -> None:
        self._core = core
        self._timeout_ns = int(timeout_s * SECOND)

    @property
    def core(self) -> Core:
        """What it is over."""
        return self._core

    @property
    def any(self) -> bool:
        """Whether there is such a node."""
        return bool(self._core.links.locals)

    def leading(self, chain: Sequence[BlockKey]) -> int:
        """How many leading blocks are here."""
        return self._core.here.leading(chain) if self._core.links.locals else 0

    def read(self, chain: Sequence[BlockKey], rows: Bytes) -> bool:
        """Fill the first rows of `rows`, uint8 `[n, payload bytes]`, with the whole blocks of `chain`; False when one isn't here."""
        if not self._core.links.locals:
            return False
        return all(self._core.here.read(chain, [self._core.block_tokens] * len(chain), rows, self._limits()))

    def write(self, chain: Sequence[BlockKey], rows: Bytes, wish: Wish) -> bool:
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

    def view(self, chain: Sequence[BlockKey]) -> View:
        """A view of the leading blocks of `chain` that are here."""
        return view_of(self._core.here, self._core.namespace.geometry, chain)

    def _limits(self) -> Limits:
        return Limits(time.monotonic_ns() + self._timeout_ns)
