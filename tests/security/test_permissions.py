"""Files that processes make are for their own user only, whatever the umask."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.block import BlockKey
from kvpool.cli.state import ClusterState, write_state
from kvpool.security.audit import AuditLog
from kvpool.security.tenants import TenantBook
from kvpool.security.tokens import new_token
from kvpool.testing.node_process import NodeProcess
from kvpool.tier import Arena
from kvpool.tier.contract import Record
from kvpool.tier.ssd import SsdTier
from kvpool.units import MIB


@pytest.fixture(autouse=True)
def loose_umask() -> Iterator[None]:
    """The most careless one."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(directory: Path) -> set[str]:
    """Names and modes of files that somebody else may open, under `directory`."""
    found = [path for path in directory.rglob("*") if not path.is_dir()]
    assert found
    return {f"{path.name} {stat.filemode(path.lstat().st_mode)}" for path in found if path.lstat().st_mode & 0o077}


def test_arena_of_a_node_is_private(tmp_path: Path) -> None:
    """Whoever maps it reads everybody's KV."""
    arena = Arena.create(tmp_path, "0" * 32, 1, MIB)
    assert modes(tmp_path) == set()
    arena.close()


def test_files_of_the_ssd_are_private(tmp_path: Path) -> None:
    """Segments and superblock."""
    tier = SsdTier.open(tmp_path / "ssd", capacity_bytes=128 * MIB, max_objects=100, incarnation=1)
    assert tier.put([Record(BlockKey(bytes(32)), None, 0, np.ones(1000, np.uint8))], 1 << 62) == [True]
    tier.close()
    assert modes(tmp_path) == set()
    assert (tmp_path / "ssd").stat().st_mode & 0o077 == 0


def test_state_tokens_limits_and_audit_log_are_private(tmp_path: Path) -> None:
    """Their locks too."""
    write_state(tmp_path / "cluster.json", ClusterState(cluster_url="redis://x", router_url="http://x", pid=1, log_dir="/"))
    new_token(tmp_path / "tokens", name="a", tenant=None, rights=["read"], now_s=0)
    TenantBook(tmp_path / "tenants.json").change("a", max_bytes=1)
    AuditLog(tmp_path / "audit.log").close()
    assert modes(tmp_path) == set()


def test_everything_a_node_makes_is_private(tmp_path: Path) -> None:
    """As a process, with every flag that makes a file."""
    (tmp_path / "shm").mkdir()
    flags = ("--capacity", "4MiB", "--offer", "shm,grpc", "--ssd", str(tmp_path / "ssd"), "--ssd-capacity", "128MiB")
    node = NodeProcess(*flags, "--audit-log", str(tmp_path / "audit.log"), arena_dir=tmp_path / "shm")
    try:
        assert modes(tmp_path) == set()
        assert (tmp_path / "ssd").stat().st_mode & 0o077 == 0
        assert (tmp_path / "ssd" / "tenants.json").is_file()
    finally:
        node.stop()
