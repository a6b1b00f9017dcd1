"""Sweeping up the sockets of dead nodes, and leaving all others alone."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.tier import Arena, reap_stale
from kvpool.tier.sockets import reap_sockets, socket_path

NODE = "0123456789abcdef" * 2


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    yield made
    for one in made:
        one.close()


def bound(path: Path, made: list[socket.socket], *, listens: bool) -> Path:
    """A node's socket; one that doesn't listen is what a dead node leaves."""
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.chdir(path.parent):  # a path may be longer than an address
        one.bind(path.name)
    if listens:
        one.listen()
        made.append(one)
    else:
        one.close()
    return path


def test_socket_that_nobody_serves_is_swept_and_a_served_one_stays(tmp_path: Path, sockets: list[socket.socket]) -> None:
    """The kernel knows whether anybody listens, also where the arena lies elsewhere."""
    dead = bound(socket_path(tmp_path, NODE, 1), sockets, listens=False)
    served = bound(socket_path(tmp_path, NODE, 2), sockets, listens=True)
    assert reap_sockets(tmp_path) == (dead,)
    assert [path.name for path in tmp_path.iterdir()] == [served.name]


def test_socket_goes_with_its_arena_and_not_before(tmp_path: Path, sockets: list[socket.socket]) -> None:
    """A node that lives and doesn't listen yet, or not any more, keeps its name."""
    with Arena.create(tmp_path, NODE, 1, 4096):
        beside = bound(socket_path(tmp_path, NODE, 1), sockets, listens=False)
        assert reap_stale(tmp_path) == ()
        assert beside.exists()
    (tmp_path / f"kvpool-{NODE}-1.arena").touch()
    assert reap_stale(tmp_path) == (tmp_path / f"kvpool-{NODE}-1.arena", beside)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_socket_of_a_node_stays(tmp_path: Path, sockets: list[socket.socket], monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, other names, and sockets of other users are not ours to judge."""
    socket_path(tmp_path, NODE, 1).touch()
    bound(tmp_path / "other.sock", sockets, listens=False)
    assert reap_sockets(tmp_path) == ()
    foreign = bound(socket_path(tmp_path, NODE, 2), sockets, listens=False)
    monkeypatch.setattr("kvpool.tier.sockets.os.geteuid", lambda: 12345)
    assert reap_sockets(tmp_path) == ()
    monkeypatch.undo()
    assert reap_sockets(tmp_path) == (foreign,)


def test_directory_deeper_than_an_address_is_swept_too(tmp_path: Path, sockets: list[socket.socket]) -> None:
    """Socket addresses have room for 107 bytes; directories may be deeper."""
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    dead = bound(socket_path(deep, NODE, 1), sockets, listens=False)
    assert reap_sockets(deep) == (dead,)
