"""A whole local cluster of tiny programs: ready when it is, repaired when it breaks, gone when it is stopped or killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvpool.cli.procs import ClusterOptions, ProcessSpec
from kvpool.cli.state import read_state, state_path
from kvpool.cli.supervisor import LocalCluster, joined
from kvpool.cluster import open_membership
from kvpool.errors import ClosedError, ConfigError, DeadlineError, UnavailableError
from kvpool.testing.membership_kit import eventually

Toys = Callable[[ClusterOptions, str], Sequence[ProcessSpec]]
READY_S = 60.0
LEASE_MS = 900


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def _all_pids(cluster: LocalCluster) -> list[int]:
    return [row.pid for row in cluster.rows() if row.pid is not None]


def test_cluster_is_ready_when_all_have_joined_and_gone_when_stopped(toys: Toys, tmp_path: Path) -> None:
    """Ready means usable; stopped means no process, no state file, and a clean leave of every member."""
    cluster = LocalCluster(ClusterOptions(nodes=2, port=0), log_dir=tmp_path / "logs", state_file=state_path(), processes=toys)
    with cluster:
        cluster.wait_ready(READY_S)
        roles = [member.role for member in cluster.membership.members()]
        assert roles == ["decode", "node", "node", "prefill", "router"]
        state = read_state(state_path())
        assert state is not None
        assert (state.cluster_url, state.router_url, state.pid) == (cluster.cluster_url, cluster.url, os.getpid())
        with open_membership(state.cluster_url) as other:
            assert len(other.members()) == 5
        pids = _all_pids(cluster)
        assert len(pids) == 6
        assert cluster.pids("node") == [row.pid for row in cluster.rows() if row.role == "node"]
    assert all(_gone(pid) for pid in pids)
    assert not state_path().exists()
    assert (tmp_path / "logs" / "decode-0.log").read_text().split() == ["joined", "left"]
    with pytest.raises(ClosedError):
        _ = cluster.cluster_url
    cluster.stop()


def test_cluster_repairs_each_kind_of_process(toys: Toys) -> None:
    """Whatever is killed comes back: workers, nodes, the router at its old address, and the membership server."""
    with LocalCluster(ClusterOptions(port=0), processes=toys, lease_ms=LEASE_MS) as cluster:
        cluster.wait_ready(READY_S)
        url, cluster_url = cluster.url, cluster.cluster_url
        for role in ("decode", "prefill", "node", "router", "membership"):
            old = cluster.kill(role)
            assert not cluster.ready()
            cluster.wait_ready(READY_S)
            assert cluster.pids(role) not in ([], [old])
        assert (cluster.url, cluster.cluster_url) == (url, cluster_url)
        assert len(cluster.membership.members()) == 4
        log_dir = cluster.log_dir
    assert log_dir.exists()  # something died: its logs are worth keeping


def test_cluster_without_mishaps_takes_its_temporary_logs_away(toys: Toys) -> None:
    """Test suites start many clusters; what nobody needs is not left in /tmp."""
    with LocalCluster(ClusterOptions(port=0), processes=toys) as cluster:
        cluster.wait_ready(READY_S)
    assert not cluster.log_dir.exists()


def test_cluster_is_over_when_nothing_runs_and_nothing_will(toys: Toys) -> None:
    """With restarts off each death is for good; after the last one there is nothing to wait for."""
    with LocalCluster(ClusterOptions(port=0, restart=False), processes=toys) as cluster:
        cluster.wait_ready(READY_S)
        for role in ("node", "prefill", "decode", "router"):
            assert not cluster.over
            cluster.kill(role)
        assert cluster.over


def test_cluster_with_a_process_that_never_stays_up_says_why(toys: Toys) -> None:
    """A wrong flag or a missing package shows as the process's own last words, not as a timeout."""

    def with_a_bad_one(options: ClusterOptions, cluster_url: str) -> Sequence[ProcessSpec]:
        specs = list(toys(options, cluster_url))
        bad = (sys.executable, "-c", "raise SystemExit('no such model: [gpt-9]')")
        return [ProcessSpec(role=spec.role, index=spec.index, argv=bad) if spec.role == "decode" else spec for spec in specs]

    words = r"decode-0 does not stay up \(exit code 1\)[\s\S]*no such model: \[gpt-9\]"
    with LocalCluster(ClusterOptions(port=0), processes=with_a_bad_one) as cluster, pytest.raises(UnavailableError, match=words):
        cluster.wait_ready(READY_S)


def test_cluster_not_ready_in_time_names_what_is_missing(toys: Toys) -> None:
    """The wait ends and says for whom it waited."""

    def with_a_slow_one(options: ClusterOptions, cluster_url: str) -> Sequence[ProcessSpec]:
        slow = (sys.executable, "-c", "import time; time.sleep(600)")
        return [ProcessSpec(role=s.role, index=s.index, argv=slow) if s.role == "prefill" else s for s in toys(options, cluster_url)]

    with LocalCluster(ClusterOptions(port=0), processes=with_a_slow_one) as cluster:
        cluster.membership.wait(lambda view: len(view) == 3, 2**62)
        with pytest.raises(DeadlineError, match="missing: 1 prefill"):
            cluster.wait_ready(0)


def test_cluster_on_a_taken_port_fails_before_anything_starts(toys: Toys) -> None:
    """The commonest mistake is reported at once."""
    with LocalCluster(ClusterOptions(port=0, nodes=0, prefill=0), processes=toys) as cluster:
        cluster.wait_ready(READY_S)
        port = int(cluster.url.rsplit(":", 1)[1])
        second = LocalCluster(ClusterOptions(port=port), processes=toys)
        with pytest.raises(ConfigError, match="--port"):
            second.start()
        assert second.rows() == ()


def test_cluster_start_that_fails_half_way_leaves_nothing(toys: Toys, tmp_path: Path) -> None:
    """An error while the table is made stops the server that runs already."""
    seen: list[str] = []

    def broken(options: ClusterOptions, cluster_url: str) -> Sequence[ProcessSpec]:
        seen.append(cluster_url)
        raise ConfigError("no")

    cluster = LocalCluster(ClusterOptions(port=0), log_dir=tmp_path, processes=broken)
    with pytest.raises(ConfigError, match="no"):
        cluster.start()
    with open_membership(seen[0]) as membership:
        assert not membership.connected


_SUPERVISOR = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from conftest import toy_processes
from kvpool.cli.supervisor import ClusterOptions, LocalCluster
cluster = LocalCluster(ClusterOptions(port=0), log_dir=Path(sys.argv[2]), processes=toy_processes)
cluster.start()
cluster.wait_ready(60)
print(*[row.pid for row in cluster.rows()], cluster._guard.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_cluster_of_a_killed_supervisor_leaves_no_orphan(number: signal.Signals, tmp_path: Path) -> None:
    """`kill -9` of the supervisor ends every process of its cluster, the guard last."""
    command = [sys.executable, "-c", _SUPERVISOR, str(Path(__file__).parent), str(tmp_path / "logs")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(word) for word in supervisor.stdout.readline().split()]
        assert len(pids) == 6
        assert not any(_gone(pid) for pid in pids)
        supervisor.send_signal(number)
    eventually(lambda: all(_gone(pid) for pid in pids), "every process is gone")
    words = (tmp_path / "logs" / "guard.log").read_text()
    assert words.startswith("the supervisor died; killed "), words


@pytest.mark.parametrize(
    ("starts", "arrivals", "count"),
    [
        ([], [], 0),
        ([1.0], [], 0),
        ([1.0], [2.0], 1),
        ([3.0], [2.0], 0),
        ([1.0, 3.0], [2.0], 1),
        ([1.0, 3.0], [2.0, 4.0], 2),
        ([1.0, 3.0], [4.0, 5.0], 2),
        ([3.0, 3.5], [2.0, 4.0], 1),
    ],
)
def test_joined_matches_each_process_to_a_later_arrival(starts: list[float], arrivals: list[float], count: int) -> None:
    """A member seen before a process started can't be that process: it is the dead one, still listed."""
    assert joined(starts, arrivals) == count
