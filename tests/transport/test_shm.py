"""The mapped reach passes the kit, across processes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvpool.testing.reach_kit import FarSide, ReachKit
from kvpool.transport import ShmReach


@pytest.fixture(scope="module")
def sides(far_sides: Callable[..., Any]) -> Any:
    return far_sides(lambda owner: ShmReach(owner.map()), ucx=False, outlives_owner=True)


class TestShmReach(ReachKit):
    """Reads outlive the owner: its memory stays mapped."""

    @pytest.fixture
    def far(self, sides: Any) -> Iterator[FarSide]:
        yield from sides.borrow()
