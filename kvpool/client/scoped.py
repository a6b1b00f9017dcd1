"""A pool client as one tenant sees it: the same connections, keys from the tenant's root, bytes against its quota."""

from collections.abc import Sequence

from kvpool.block import BlockKey
from kvpool.client import reading, writing
from kvpool.client.core import Core
from kvpool.client.layered import LayerRun, layers
from kvpool.client.transfer import Payload, Touch
from kvpool.client.writing import Wish
from kvpool.request import Scope


class ScopedPool:
    """Loads and stores of one `Scope` over the `core` of a client, which stays the client's to close. Made by `AsyncPoolClient.scoped`."""

    def __init__(self, core: Core, scope: Scope) -> None:
        self._core = core.salted(scope.salt)
        self._tenant = scope.tenant

    async def load(self, chain: Sequence[BlockKey], first: int, counts: Sequence[int], sink: Touch, *, deadline_ns: int) -> int:
        """See `AsyncPoolClient.load`."""
        return await reading.load(self._core, chain, first, counts, sink, deadline_ns)

    async def layers(self, chain: Sequence[BlockKey], first: int, counts: Sequence[int], *, deadline_ns: int) -> LayerRun:
        """See `AsyncPoolClient.layers`."""
        return await layers(self._core, chain, first, counts, deadline_ns)

    async def load_into(self, chain: Sequence[BlockKey], first: int, targets: Sequence[Payload], *, deadline_ns: int) -> int:
        """See `AsyncPoolClient.load_into`."""
        return await reading.load_into(self._core, chain, first, self._core.tokens_of(targets), targets, deadline_ns)

    async def store(
        self,
        chain: Sequence[BlockKey],
        first: int,
        counts: Sequence[int],
        fill: Touch,
        *,
        deadline_ns: int,
        ttl_ns: int = 0,
        also: Sequence[str] = (),
    ) -> int:
        """See `AsyncPoolClient.store`."""
        wish = Wish(ttl_ns, (), self._tenant)
        return (await writing.store(self._core, chain, first, counts, fill, deadline_ns=deadline_ns, wish=wish, also=also)).held

    def reaches(self) -> dict[str, str]:
        """Reach in use per node id."""
        return self._core.links.reaches()

    def scoped(self, scope: Scope) -> "ScopedPool":
        """Another tenant's view."""
        return ScopedPool(self._core, scope)
