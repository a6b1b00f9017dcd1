"""The state file: private, whole, ignored once its cluster is gone."""

import os
import subprocess
from pathlib import Path

import pytest

from kvpool.cli.state import ClusterState, clear_state, find_cluster, read_state, runtime_dir, state_path, write_state
from kvpool.errors import ConfigError


def _state(pid: int) -> ClusterState:
    return ClusterState(cluster_url="redis://127.0.0.1:1/0?cluster=local", router_url="http://127.0.0.1:8000", pid=pid, log_dir="/logs")


def test_state_round_trip_is_private() -> None:
    """Only this user reads where the cluster is."""
    write_state(state_path(), _state(os.getpid()))
    assert read_state(state_path()) == _state(os.getpid())
    assert state_path().stat().st_mode & 0o777 == 0o600
    assert state_path().parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in runtime_dir().iterdir()] == ["cluster.json"]


def test_state_of_a_dead_supervisor_is_no_cluster() -> None:
    """A file left by `kill -9` must not send commands to a port that may be anybody's."""
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    write_state(state_path(), _state(gone.pid))
    assert read_state(state_path()) is None
    with pytest.raises(ConfigError, match="kvpool up"):
        find_cluster(None)


def test_state_is_cleared_only_by_its_owner() -> None:
    """A cluster that stops doesn't hide another that started since."""
    write_state(state_path(), _state(os.getpid()))
    clear_state(state_path(), os.getpid() + 1)
    assert state_path().exists()
    clear_state(state_path(), os.getpid())
    assert not state_path().exists()
    clear_state(state_path(), os.getpid())


def test_find_cluster_prefers_the_url_given() -> None:
    """A flag overrides the state file, and works without one."""
    assert find_cluster("redis://elsewhere:6379/0") == "redis://elsewhere:6379/0"
    write_state(state_path(), _state(os.getpid()))
    assert find_cluster(None) == _state(0).cluster_url
    assert find_cluster("memory://x") == "memory://x"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"cluster_url":"a","router_url":"b","log_dir":"c","pid":"x"}'])
def test_state_damaged_is_an_error_that_says_what_to_do(text: str) -> None:
    """Neither a traceback nor a silent 'no cluster'."""
    state_path().write_text(text)
    with pytest.raises(ConfigError, match="--cluster"):
        read_state(state_path())


def test_runtime_dir_open_to_others_is_refused(tmp_path: Path) -> None:
    """In a shared /tmp somebody else may have made the directory, to plant a state file."""
    directory = tmp_path / f"kvpool-{os.getuid()}"
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(ConfigError, match="XDG_RUNTIME_DIR"):
        runtime_dir()
    directory.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    directory.symlink_to(elsewhere)
    with pytest.raises(ConfigError):
        runtime_dir()
