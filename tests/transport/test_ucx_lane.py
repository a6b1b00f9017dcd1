"""What one request may carry, and who serves it."""

import pytest

from kvpool.errors import ConfigError, UnavailableError
from kvpool.transport import Run, UcxOffer
from kvpool.transport.ucx.lane import check_offer, is_one_sided, pieces
from kvpool.transport.ucx.session import usable_transports
from kvpool.units import MIB


def test_pieces_of_an_emulated_lane_fit_one_message_and_lose_nothing() -> None:
    """A message of two segments could leave the target with an answer it can't send."""
    cut = list(pieces([Run(10, 2 * MIB + 5, 3), Run(99, 0, 0), Run(7, 1, 8)], one_sided=False))
    assert cut == [Run(10, MIB, 3), Run(10 + MIB, MIB, 3 + MIB), Run(10 + 2 * MIB, 5, 3 + 2 * MIB), Run(7, 1, 8)]


def test_pieces_of_a_one_sided_lane_are_the_runs() -> None:
    """The network card cuts by itself."""
    assert list(pieces([Run(10, 5 * MIB, 3), Run(99, 0, 0)], one_sided=True)) == [Run(10, 5 * MIB, 3)]


@pytest.mark.parametrize(
    ("transports", "alone"),
    [
        ((), False),
        (("tcp/lo",), False),
        (("ud_mlx5/mlx5_0:1",), False),
        (("rc_mlx5/mlx5_0:1", "tcp/eth0"), True),
        (("dc_mlx5/mlx5_0:1",), True),
    ],
)
def test_only_reliable_rdma_transports_serve_alone(transports: tuple[str, ...], alone: bool) -> None:
    """Everything else is emulated by messages; an unknown transport is taken for such a one."""
    assert is_one_sided(transports) is alone


@pytest.mark.parametrize(
    ("wanted", "version", "used"),
    [
        ("^sm", (1, 18, 1), "tcp,self"),
        ("^sm", (1, 19, 0), "^sm"),
        ("tcp,self", (1, 18, 1), "tcp,self"),
        ("rc,ud", (1, 21, 0), "rc,ud"),
    ],
)
def test_old_ucx_is_kept_off_rdma(wanted: str, version: tuple[int, ...], used: str) -> None:
    """Before 1.19 the target's CPU answers gets over RDMA, in messages that nobody bounds."""
    assert usable_transports(wanted, version) == used


@pytest.mark.parametrize("wanted", ["rc", "tcp,rc_verbs", "ib", "all", "dc_mlx5"])
def test_old_ucx_asked_for_rdma_by_name_is_a_clear_error(wanted: str) -> None:
    """Silently taking TCP would look as if the cards were slow."""
    with pytest.raises(ConfigError, match=r"install UCX 1\.19"):
        usable_transports(wanted, (1, 18, 1))


def test_offer_that_ucx_would_abort_on_is_refused_before() -> None:
    """UCX asserts the version of an address, and reads as many bytes as it expects of both."""
    good = UcxOffer(worker_address=bytes(range(16, 122)), rkey=bytes(11), base_address=4096, length=1)
    check_offer(good)
    for worker_address, rkey, message in (
        (b"\x02" + good.worker_address[1:], good.rkey, "newer"),
        (b"", good.rkey, "cut short"),
        (good.worker_address[:9], good.rkey, "cut short"),
        (good.worker_address, b"", "cut short"),
        (good.worker_address, good.rkey[:8], "cut short"),
    ):
        with pytest.raises(UnavailableError, match=message):
            check_offer(UcxOffer(worker_address=worker_address, rkey=rkey, base_address=4096, length=1))
