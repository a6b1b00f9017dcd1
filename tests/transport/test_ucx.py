"""The UCX reach passes the kit, across processes, over TCP on this host."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvpool.testing.reach_kit import FarSide, ReachKit
from kvpool.transport.ucx import UcxReach


@pytest.fixture(scope="module")
def sides(far_sides: Callable[..., Any]) -> Any:
    return far_sides(lambda owner: UcxReach(owner.ucx_offer()), ucx=True, outlives_owner=False)


class TestUcxReach(ReachKit):
    """A peer that hangs, dies or wakes up late is an error by the deadline."""

    @pytest.fixture
    def far(self, sides: Any) -> Iterator[FarSide]:
        yield from sides.borrow()
