"""Far sides for the reach kit: the owner of the arena is another process, kept from test to test until one kills it."""

from collections.abc import Callable, Iterator

import pytest

from kvpool.testing.arena_owner import ArenaOwner
from kvpool.testing.reach_kit import WINDOW_BYTES
from kvpool.transport import Reach
from kvpool.transport.reach import Bytes
from kvpool.transport.ucx import UcxReach
from kvpool.units import MIB

Opener = Callable[[ArenaOwner], Reach]


class ProcessFar:
    """`FarSide` over an `ArenaOwner`."""

    offset = MIB + 64
    lease_id = 0

    def __init__(self, owner: ArenaOwner, opener: Opener, *, outlives_owner: bool) -> None:
        self.owner = owner
        self.outlives_owner = outlives_owner
        self.arena_bytes = owner.mapping.capacity
        self.window: Bytes = owner.mapping.view(self.offset, WINDOW_BYTES)
        self.opened: list[Reach] = []
        self._opener = opener

    @property
    def serves_frozen(self) -> bool:
        return any(isinstance(reach, UcxReach) and reach.one_sided for reach in self.opened)

    def open(self) -> Reach:
        self.opened.append(self._opener(self.owner))
        return self.opened[-1]

    def freeze(self) -> None:
        self.owner.freeze()

    def thaw(self) -> None:
        self.owner.thaw()

    def kill(self) -> None:
        self.owner.kill()


class FarSides:
    """Makes far sides of one kind, with a new owner whenever the last one has died."""

    def __init__(self, opener: Opener, *, outlives_owner: bool, ucx: bool = False, tcp: bool = False) -> None:
        self._opener, self._outlives_owner = opener, outlives_owner
        self._ucx, self._tcp = ucx, tcp
        self._owner: ArenaOwner | None = None

    def borrow(self) -> Iterator[ProcessFar]:
        """A far side for one test; its reaches are closed afterwards."""
        if self._owner is None or not self._owner.alive:
            self.end()
            self._owner = ArenaOwner(WINDOW_BYTES + 2 * MIB + 4097, ucx=self._ucx, tcp=self._tcp)
        far = ProcessFar(self._owner, self._opener, outlives_owner=self._outlives_owner)
        yield far
        for reach in far.opened:
            reach.close()

    def end(self) -> None:
        """End the owner, if there is one."""
        if self._owner is not None:
            self._owner.close()


@pytest.fixture(scope="module")
def far_sides() -> Iterator[Callable[..., FarSides]]:
    """Factory of `FarSides`, ended with the module."""
    made: list[FarSides] = []

    def make(opener: Opener, *, outlives_owner: bool, ucx: bool = False, tcp: bool = False) -> FarSides:
        made.append(FarSides(opener, outlives_owner=outlives_owner, ucx=ucx, tcp=tcp))
        return made[-1]

    yield make
    for sides in made:
        sides.end()
