"""The order in which reaches are tried, and that the log says why."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvpool.client import choose
from kvpool.errors import UnavailableError
from kvpool.request.pool import NodeDescription, TcpOffer, UcxOffer

NODE = NodeDescription(
    node_id="0a" * 16, incarnation=1, capacity_bytes=1, free_bytes=1, used_bytes=0, pinned_bytes=0, blocks=0, read_leases=0, write_leases=0,
    ucx=UcxOffer(worker_address=b"a", rkey=b"r", base_address=1, length=1), tcp=TcpOffer(address="127.0.0.1:1"),
)  # fmt: skip


class Fake:
    """A reach that opens."""

    def __init__(self, name: str, transports: tuple[str, ...] = ()) -> None:
        self.name, self.transports, self.closed = name, transports, False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Fake]]:
    """Set what works; the reaches that have been opened, in order."""

    def make(*, device: bool, transports: tuple[str, ...] = (), tcp: bool = True) -> list[Fake]:
        opened: list[Fake] = []

        def ucx(offer: UcxOffer) -> Fake:
            opened.append(Fake("ucx", transports))
            return opened[-1]

        def dial(peer: object) -> Fake:
            if not tcp:
                raise UnavailableError("nobody there")
            opened.append(Fake("tcp"))
            return opened[-1]

        devices = tmp_path / "infiniband"
        (devices / "mlx5_0").mkdir(parents=True) if device else devices.mkdir()
        monkeypatch.setattr(choose, "_RDMA_DEVICES", devices)
        monkeypatch.setattr(choose, "UcxReach", ucx)
        monkeypatch.setattr(choose, "TcpReach", dial)
        return opened

    return make


def chosen(**how: object) -> str:
    return choose.open_reach(NODE, "127.0.0.1:2", "auto", **how).name  # type: ignore[arg-type]


def test_rdma_comes_before_sockets(world: Callable[..., list[Fake]]) -> None:
    """The hardware serves it by itself."""
    opened = world(device=True, transports=("rc_mlx5/mlx5_0:1",))
    assert chosen() == "ucx"
    assert [reach.name for reach in opened] == ["ucx"]


def test_sockets_come_before_ucx_over_sockets(world: Callable[..., list[Fake]], caplog: pytest.LogCaptureFixture) -> None:
    """With a device here that doesn't lead to the node it shows only once a byte has been read; that reach is closed again."""
    caplog.set_level(logging.INFO)
    opened = world(device=True, transports=("tcp/eth0",))
    assert chosen() == "tcp"
    assert [(reach.name, reach.closed) for reach in opened] == [("ucx", True), ("tcp", False)]
    assert "reach tcp (shm: not offered; ucx: not by RDMA, but over tcp/eth0)" in caplog.text


def test_ucx_is_not_even_tried_without_a_device(world: Callable[..., list[Fake]]) -> None:
    """It takes tens of milliseconds to connect."""
    opened = world(device=False)
    assert chosen() == "tcp"
    assert [reach.name for reach in opened] == ["tcp"]


@pytest.mark.parametrize("skip", [(), ("tcp",)])
def test_ucx_over_sockets_is_better_than_grpc(world: Callable[..., list[Fake]], skip: tuple[str, ...]) -> None:
    """Where the TCP plane isn't reached, or has failed lately."""
    world(device=False, tcp=bool(skip))
    assert chosen(skip=skip) == "ucx"


def test_nothing_works_and_every_reason_is_told_once(world: Callable[..., list[Fake]]) -> None:
    """Whoever reads it must know where to begin."""
    world(device=False, tcp=False)
    node = replace(NODE, ucx=None, grpc_data=False)
    with pytest.raises(UnavailableError) as caught:
        choose.open_reach(node, "127.0.0.1:2", "auto")
    assert str(caught.value).endswith("shm: not offered; ucx: not offered; tcp: nobody there; grpc: not offered")
