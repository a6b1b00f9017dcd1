"""The UCX reach passes the kit, across processes, over TCP on this host."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvpool.errors import ConfigError
from kvpool.testing.reach_kit import SCATTERED, SCATTERED_BYTES, Client, FarSide, ReachKit, noise
from kvpool.transport import Run
from kvpool.transport.ucx import UcxReach, UcxSettings, lane, wire


@pytest.fixture(scope="module")
def sides(far_sides: Callable[..., Any]) -> Any:
    return far_sides(lambda owner: UcxReach(owner.ucx_offer()), ucx=True, outlives_owner=False)


@pytest.fixture
def far(sides: Any) -> Iterator[FarSide]:
    yield from sides.borrow()


class TestUcxReach(ReachKit):
    """A peer that hangs, dies or wakes up late is an error by the deadline."""


def test_transports_are_known_and_never_shared_memory(far: FarSide) -> None:
    """With UCX's shared memory a dead peer would abort us."""
    reach = far.open()
    assert isinstance(reach, UcxReach)
    assert reach.transports
    assert not any(name.startswith(("cma", "posix", "sysv", "knem", "xpmem")) for name in reach.transports)


def test_lanes_of_a_one_sided_transport_move_the_same_bytes(far: FarSide, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way RDMA takes (whole runs, many on the way, one flush), taken over TCP with a peer that stays alive."""
    monkeypatch.setattr(wire, "is_one_sided", lambda transports: True)
    client, source, into = Client(far), noise(SCATTERED_BYTES, 9), np.zeros(SCATTERED_BYTES, np.uint8)
    client.write(SCATTERED, source)
    client.read(SCATTERED, into)
    for _, length, at in SCATTERED:
        assert np.array_equal(into[at : at + length], source[at : at + length])
    small = [Run(3 * index, 2, 2 * index) for index in range(10 * lane.WINDOW)]
    client.write(small, source)
    into[:] = 0
    client.read(small, into)
    assert np.array_equal(into[: 20 * lane.WINDOW], source[: 20 * lane.WINDOW])


def test_unusable_transports_are_a_clear_error(far: FarSide, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typing error in a variable must not look like a dead node."""
    monkeypatch.setenv("KVPOOL_UCX_TLS", "carrier_pigeon")
    with pytest.raises(ConfigError, match="carrier_pigeon"):
        far.open()
    assert UcxSettings().transports == "^sm"
