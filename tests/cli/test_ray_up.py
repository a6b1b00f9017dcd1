"""A cluster in the hands of a real Ray: it serves, is repaired, scales, and leaves nothing, however it ends.

Ray runs in processes of its own, never in that of the tests.
"""

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvpool.cli.chat import ChatClient
from kvpool.cli.ray.engine import descendants, sweep_directories

HERE = str(Path(__file__).parent)
TIMEOUT_S = 120.0

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'kvpool[ray]'")

# A cluster of tiny programs that obeys its standard input, `scale ROLE COUNT` and `kill ROLE INDEX`, and answers `ready`.
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from conftest import toy_processes
from pathlib import Path
from kvpool.cli.procs import ClusterOptions
from kvpool.cli.ray.cluster import RayCluster
from kvpool.cli.ray.scaling import Limits

say = lambda line: print(line, flush=True)
cluster = RayCluster(ClusterOptions(nodes=int(sys.argv[3]), port=0), address=sys.argv[4], membership_url=sys.argv[5] or None,
                     limits=Limits(least=1, most=3), log_dir=Path(sys.argv[2]), on_event=say, processes=toy_processes)
with cluster:
    cluster.wait_ready(100)
    say("ready")
    for line in sys.stdin:
        verb, role, count = line.split()
        if verb == "scale":
            cluster._ray_table.scale(role, int(count))
        else:
            say(f"killed {cluster.kill(role, int(count))}, ready: {cluster.ready()}")
        cluster.wait_ready(100)
        say(f"ready {len(cluster.membership.members(role))} {role}")
say("stopped")
"""

# A Ray of somebody else with two hosts (two raylets of one machine), and the membership server its members meet at.
OTHERS = """
import os, sys, tempfile
from pathlib import Path
with tempfile.TemporaryDirectory(prefix="kvray-") as files:
    Path(files, "ray").mkdir()
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_prestart_worker_first_driver="0", RAY_TMPDIR=files)
    from ray.cluster_utils import Cluster
    from kvpool.cluster.embedded import EmbeddedServer

    with EmbeddedServer.start(Path(sys.argv[1])) as server:
        room = {"num_cpus": 6, "num_gpus": 0, "object_store_memory": 80 << 20, "memory": 4 << 30, "include_dashboard": False}
        hosts = Cluster(initialize_head=True, head_node_args=room)
        hosts.add_node(**room)
        print("at", hosts.address, server.url, flush=True)
        sys.stdin.read()
        hosts.shutdown()
"""


class Process:
    """A command whose output is read line by line, with a limit; ended with the test."""

    def __init__(self, argv: list[str], log: Path) -> None:
        self._log = log
        with log.open("w") as output:
            self.popen = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, text=True)

    def text(self) -> str:
        return self._log.read_text()

    def wait_for(self, pattern: str, *, times: int = 1) -> str:
        """The first group of the latest match, once `pattern` has matched so often."""
        eventually(lambda: len(re.findall(pattern, self.text())) >= times or self.popen.poll() is not None, pattern)
        found = re.findall(pattern, self.text())
        assert len(found) >= times, self.text()
        return str(found[-1])

    def pids(self) -> list[int]:
        """Itself and everything that it has started, Ray's daemons and what they started included."""
        return sorted({self.popen.pid} | descendants(self.popen.pid))

    def tell(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()

    def close(self) -> None:
        if self.popen.poll() is None:
            self.popen.terminate()
            self.popen.wait(TIMEOUT_S)
        assert self.popen.stdin is not None
        self.popen.stdin.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(*argv: str) -> Process:
        started.append(Process([sys.executable, *argv], tmp_path / f"output-{len(started)}"))
        return started[-1]

    yield start
    for process in reversed(started):
        process.close()


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {TIMEOUT_S} s: {what}"
        time.sleep(0.05)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def _left(pids: list[int]) -> list[str]:
    return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids if not _gone(pid)]


def _assert_all_end(pids: list[int]) -> None:
    eventually(lambda: not any(not _gone(pid) for pid in pids), f"{len(pids)} processes are gone; left: {_left(pids)}")


@needs_ray
@pytest.mark.e2e
def test_up_with_ray_serves_repairs_and_ends_clean(run: Callable[..., Process], tmp_path: Path) -> None:
    """kill -9 of the decode worker: Ray replaces it, a request meanwhile is answered, with the same tokens. SIGTERM leaves no process."""
    up = run("-m", "kvpool.cli", "up", "--ray", "local", "--port", "0", "--capacity", "128MiB", "--log-dir", str(tmp_path / "logs"))
    chat = ChatClient(up.wait_for(r"ready: (http://\S+) "), timeout_s=TIMEOUT_S)
    ask = [{"role": "user", "content": "Count from one to five."}]
    before = chat.chat(ask, model="smollm2", max_tokens=8)
    pids = up.pids()
    decode = int(up.wait_for(r"decode-0 started \(pid (\d+) "))
    assert decode in pids
    os.kill(decode, signal.SIGKILL)
    assert chat.chat(ask, model="smollm2", max_tokens=8).tokens == before.tokens
    assert up.wait_for(r"decode-0 died \((.*)\), Ray starts it again") == "killed by SIGKILL"
    successor = int(up.wait_for(r"decode-0 started \(pid (\d+) ", times=2))
    assert not _gone(successor)
    pids = sorted({*pids, *up.pids()})
    up.popen.send_signal(signal.SIGTERM)
    assert up.popen.wait(TIMEOUT_S) == 0
    assert up.text().endswith("stopped\n")
    assert _left(pids) == []
    assert not list(Path(tempfile.gettempdir()).glob(f"kvpool-ray-{up.popen.pid}-*"))


@needs_ray
def test_cluster_scales_and_a_killed_driver_leaves_no_orphan(run: Callable[..., Process], tmp_path: Path) -> None:
    """Workers come and go as told, a killed one is replaced. After kill -9 of the driver its own Ray ends, and the next start cleans up."""
    driver = run("-c", SCRIPT, HERE, str(tmp_path / "logs"), "1", "local", "")
    driver.wait_for("(?m)^(ready)$")
    driver.tell("scale decode 3")
    driver.wait_for("(ready 3 decode)")
    driver.tell("scale decode 1")
    driver.wait_for("(ready 1 decode)")
    assert driver.wait_for(r"decode-2 ended \((.*)\)") == "exit code 0"
    driver.tell("kill prefill 0")
    driver.wait_for("(ready 1 prefill)")
    first, second = re.findall(r"prefill-0 started \(pid (\d+) ", driver.text())
    assert first != second
    assert driver.wait_for(r"killed (\d+, ready: \w+)") == f"{first}, ready: False"
    pids = driver.pids()
    assert len(pids) > 10
    driver.popen.kill()
    driver.popen.wait(TIMEOUT_S)
    _assert_all_end(pids)
    swept = sweep_directories(Path("/tmp"))
    assert [path.name for path in swept if path.name.startswith(f"kvpool-ray-{driver.popen.pid}-")] != []


@needs_ray
def test_cluster_on_the_ray_of_others_leaves_that_as_it_was(
    run: Callable[..., Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pool nodes go to different hosts, members meet at the given server, and when the driver ends only its own processes do."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    others = run("-c", OTHERS, str(tmp_path / "valkey"))
    address, url = others.wait_for(r"at (\S+ \S+)").split()
    theirs = others.pids()
    driver = run("-c", SCRIPT, HERE, str(tmp_path / "logs"), "2", address, url)
    driver.wait_for("(?m)^(ready)$")
    ours = [int(pid) for pid in re.findall(r"started \(pid (\d+) on ", driver.text())]
    assert len(ours) == 5
    keepers = [_parent(pid) for pid in ours]
    nodes = [int(driver.wait_for(rf"node-{index} started \(pid (\d+) on ")) for index in (0, 1)]
    raylets = {_parent(_parent(pid)) for pid in nodes}
    assert len(raylets) == 2
    driver.popen.kill()
    _assert_all_end([*ours, *keepers])
    assert all(not _gone(pid) for pid in theirs)
    assert others.popen.stdin is not None
    others.popen.stdin.close()
    assert others.popen.wait(TIMEOUT_S) == 0
    _assert_all_end(theirs)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ray", "nowhere"], "--ray takes local, auto or HOST:PORT"),
        (["--ray", "10.0.0.1:6379"], "--cluster redis://HOST:PORT"),
        (["--ray", "10.0.0.1:6379", "--cluster", "memory://c"], "every host reaches"),
        (["--ray", "local", "--cluster", "redis://10.0.0.1:6379/0"], "runs its own membership server"),
        (["--ray", "local", "--min", "3", "--max", "2"], "--min and --max"),
        (["--ray", "local", "--prefill", "3", "--max", "2"], "not within"),
        (["--max", "2"], "go with --ray"),
    ],
)
@needs_ray
def test_flags_that_do_not_fit_are_told_before_anything_starts(flags: list[str], words: str) -> None:
    """One line, exit code 1, nothing started."""
    done = subprocess.run([sys.executable, "-m", "kvpool.cli", "up", *flags], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_without_ray_the_flag_says_how_to_install_it() -> None:
    """Ray is optional: its absence is told with the remedy."""
    script = (
        "import sys; sys.modules['ray'] = None; from kvpool.cli.main import main; sys.argv = ['kvpool', 'up', '--ray', 'local']; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "pip install 'kvpool[ray]'" in done.stderr
