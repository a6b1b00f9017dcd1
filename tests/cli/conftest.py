"""A cluster made of tiny programs: real membership, real signals, real restarts, no model."""

import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvpool.cli.main import cli
from kvpool.cli.procs import ClusterOptions, ProcessSpec
from kvpool.testing.twin_cluster import TwinCluster

MEMBER = """
import signal, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from kvpool.cluster import open_membership

role, cluster, port = sys.argv[1], sys.argv[2], int(sys.argv[3])

class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"status": "ok"}')
    def log_message(self, *args):
        pass

server = ThreadingHTTPServer(("127.0.0.1", port), Health)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
stop = threading.Event()
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: stop.set())
address = f"127.0.0.1:{server.server_address[1]}"
with open_membership(cluster) as membership:
    membership.join(role=role, address=address, info={"url": f"http://{address}", "model": "toy"})
    print("joined", flush=True)
    stop.wait()
print("left", flush=True)
"""


def toy_processes(options: ClusterOptions, cluster_url: str) -> Sequence[ProcessSpec]:
    """The same table as the real one, each process a program that only joins, and answers /health."""

    def toy(role: str, index: int, rank: int) -> ProcessSpec:
        port = options.port if role == "router" else 0
        return ProcessSpec(role=role, index=index, argv=(sys.executable, "-c", MEMBER, role, cluster_url, str(port)), stop_rank=rank)

    counts = {"node": options.nodes, "prefill": options.prefill, "decode": options.decode}
    members = [toy(role, index, 1) for role, count in counts.items() for index in range(count)]
    return [*members, toy("router", 0, 0)]


def broken_processes(options: ClusterOptions, cluster_url: str) -> Sequence[ProcessSpec]:
    """The toy cluster with a decode worker that can't start."""
    argv = (sys.executable, "-c", "raise SystemExit('no such weights')")
    specs = toy_processes(options, cluster_url)
    return [ProcessSpec(role=spec.role, index=spec.index, argv=argv) if spec.role == "decode" else spec for spec in specs]


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], tuple[str, ...]]:
    """The command line that runs a piece of Python."""

    def make(text: str) -> tuple[str, ...]:
        return sys.executable, "-c", textwrap.dedent(text)

    return make


@pytest.fixture
def toys() -> Callable[[ClusterOptions, str], Sequence[ProcessSpec]]:
    """The table of a cluster of tiny programs, for `LocalCluster(processes=toys)`."""
    return toy_processes


@pytest.fixture(autouse=True)
def _own_runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees, or replaces, the state of a cluster that runs on this machine."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # what broken clusters leave to be read goes with the test


@pytest.fixture
def twins() -> Iterator[TwinCluster]:
    """A cluster of in-memory twins of pool nodes, to run commands in."""
    cluster = TwinCluster(cli)
    yield cluster
    cluster.close()
