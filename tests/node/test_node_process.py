"""A node as a process: what it offers, what it refuses, how it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from kvpool.node.opening import TierConfig
from kvpool.testing.node_process import NodeProcess
from kvpool.tier import ArenaMapping
from kvpool.wire.pool_client import PoolRpc


async def describe(node: NodeProcess) -> tuple[bool, bool, bool]:
    rpc = PoolRpc(node.address)
    try:
        said = await rpc.describe(10)
    finally:
        await rpc.close()
    return said.shm is not None, said.ucx is not None, said.grpc_data


async def test_named_offers_are_the_ones_made(tmp_path: Path) -> None:
    """An operator decides which ways to the bytes are open."""
    node = NodeProcess("--capacity", "1MiB", "--offer", "shm,grpc", arena_dir=tmp_path)
    assert await describe(node) == (True, False, True)
    assert node.stop() == 0


async def test_no_usable_ucx_drops_the_offer_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without UCX still gets a node; asked for by name, UCX must work."""
    monkeypatch.setenv("KVPOOL_UCX_LIBRARY", str(tmp_path / "nowhere.so"))
    node = NodeProcess("--capacity", "1MiB", arena_dir=tmp_path)
    assert await describe(node) == (True, False, True)
    assert node.stop() == 0
    assert any("not offering UCX" in line for line in node.log)
    with pytest.raises(AssertionError, match="install UCX, or leave ucx out"):
        NodeProcess("--capacity", "1MiB", "--offer", "ucx", arena_dir=tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_node_and_leaves_no_memory_behind(tmp_path: Path, number: int) -> None:
    """A clean end: exit status 0, shared memory given back."""
    node = NodeProcess("--capacity", "1MiB", "--offer", "shm,grpc", arena_dir=tmp_path)
    assert list(tmp_path.glob("kvpool-*"))
    os.kill(node.process.pid, number)
    assert node.process.wait(30) == 0
    node.stop()
    assert list(tmp_path.iterdir()) == []


def test_memory_of_a_killed_node_is_swept_up_by_the_next(tmp_path: Path) -> None:
    """`kill -9` leaves a file behind; it must not stay forever."""
    killed = NodeProcess("--capacity", "1MiB", "--offer", "grpc", arena_dir=tmp_path)
    killed.kill()
    killed.stop()
    (left,) = tmp_path.glob("kvpool-*")
    node = NodeProcess("--capacity", "1MiB", "--offer", "grpc", arena_dir=tmp_path)
    assert not left.exists()
    assert node.stop() == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--capacity", "lots"], "not a size"),
        (["--capacity", "0"], "set --capacity"),
        (["--offer", "pigeon"], "choose from shm, ucx, tcp, grpc"),
        (["--offer", ""], "can't offer nothing"),
        (["--listen", "nowhere"], "host:port"),
        (["--capacity", "900TiB"], "lower --capacity"),
        (["--arena-dir", "/no/such/place"], "arena directory"),
        (["--id", "short"], "32"),
    ],
)
def test_bad_flags_say_what_to_do(flags: list[str], words: str) -> None:
    """One line on standard error, exit status 1, nothing left running."""
    command = [sys.executable, "-m", "kvpool.node", "--capacity", "1MiB", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert words in done.stderr.splitlines()[-1]


async def test_node_on_a_path_of_choice_is_read_through_it(tmp_path: Path) -> None:
    """An arena may lie on any mappable path, as pooled CXL memory does; readers map it where the node says it is."""
    path = tmp_path / "pooled.memory"
    process = NodeProcess("--capacity", "4MiB", "--arena", str(path), "--lock-memory", "--offer", "shm")
    try:
        rpc = PoolRpc(process.address)
        described = await rpc.describe(20)
        await rpc.close()
        assert described.shm is not None
        assert described.shm.path == str(path)
        assert ArenaMapping.open(path, described.node_id, described.incarnation).capacity == 4 << 20
    finally:
        assert process.stop() == 0, "".join(process.log)
    assert not path.exists()


def test_gpu_memory_without_a_tier_below_is_refused() -> None:
    """It would stand empty: a flag that does nothing must say so."""
    with pytest.raises(ConfigError, match="--ssd or --shared"):
        TierConfig(gpu_bytes=1 << 20)
