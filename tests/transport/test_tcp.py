"""TCP against the contract of a reach, the owner of the arena being another process."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvpool.testing.reach_kit import FarSide, ReachKit
from kvpool.transport.tcp import TcpReach


@pytest.fixture(scope="module")
def sides(far_sides: Callable[..., Any]) -> Any:
    return far_sides(lambda owner: TcpReach(owner.tcp_peer()), tcp=True, outlives_owner=False)


@pytest.fixture
def far(sides: Any) -> Iterator[FarSide]:
    yield from sides.borrow()


class TestTcpReach(ReachKit):
    """Every promise of a reach."""
