"""`kvpool up` as a process: what it prints, how it ends, and that other commands find its cluster."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from kvpool.cli.live import LiveScreen
from kvpool.cli.procs import ClusterOptions, ProcessSpec
from kvpool.cli.supervisor import LocalCluster

HERE = str(Path(__file__).parent)

# The real command, with the table of tiny programs in place of the real one and no model to find.
UP = """
import sys
sys.path.insert(0, sys.argv[1])
import conftest
import kvpool.cli.main, kvpool.cli.supervisor, kvpool.config.models
kvpool.cli.supervisor.LocalCluster.__init__.__kwdefaults__["processes"] = getattr(conftest, sys.argv[2])
kvpool.config.models.resolve_model = lambda name, deadline_ns: None
kvpool.cli.main.cli(["up", "--port", "0", *sys.argv[3:]])
"""


class Up:
    """Running commands, ended at the end of the test."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[str]] = []

    def start(self, *flags: str, table: str = "toy_processes") -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", UP, HERE, table, *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._running.append(process)
        return process

    def close(self) -> None:
        for process in self._running:
            if process.poll() is None:
                process.terminate()
            process.wait(60)
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def up() -> Iterator[Up]:
    up = Up()
    yield up
    up.close()


def _lines_until(process: "subprocess.Popen[str]", word: str) -> list[str]:
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if word in line:
            return lines
    raise AssertionError(f"{word!r} never came: {lines}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_runs_until_a_signal_and_ends_with_0(up: Up, number: signal.Signals, tmp_path: Path) -> None:
    """One line per event where there is no terminal; a clean end is a success."""
    process = up.start("--log-dir", str(tmp_path / "logs"), "--nodes", "2")
    lines = _lines_until(process, "cluster: ")
    assert lines[0] == f"starting; logs are in {tmp_path / 'logs'}"
    assert [line.split()[0] for line in lines[1:-2]] == ["membership-0", "node-0", "node-1", "prefill-0", "decode-0", "router-0"]
    assert lines[-2].startswith("ready: http://127.0.0.1:")
    process.send_signal(number)
    end = _lines_until(process, "stopped")
    assert end[0] == "stopping"
    assert end[1] == "router-0 ended (exit code 0)"
    assert process.wait(60) == 0
    assert (tmp_path / "logs" / "node-1.log").read_text().split() == ["joined", "left"]


def test_up_is_found_by_other_commands_and_refuses_a_second(up: Up) -> None:
    """No flags needed on the machine where it runs; two of them would hide each other."""
    first = up.start()
    url = _lines_until(first, "cluster: ")[-1].removeprefix("cluster: ")
    status = subprocess.run([sys.executable, "-m", "kvpool.cli", "nodes", "--json"], capture_output=True, text=True, check=False)
    assert [node["address"] != "" for node in json.loads(status.stdout)] == [True]  # found; the toy speaks no gRPC
    assert status.returncode == 2
    second = up.start()
    assert f"(pid {first.pid})" in _lines_until(second, "running already")[-1]
    assert second.wait(60) == 1
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait(60) == 0
    gone = subprocess.run([sys.executable, "-m", "kvpool.cli", "nodes", "--cluster", url], capture_output=True, text=True, check=False)
    assert gone.returncode == 1


def test_up_that_can_not_start_ends_with_1_and_the_reason(up: Up) -> None:
    """A broken worker isn't restarted for ever before the cluster ever ran."""
    process = up.start("--no-restart", table="broken_processes")
    lines = _lines_until(process, "no such weights")
    assert any(line.startswith("Error: decode-0 does not stay up (exit code 1)") for line in lines)
    assert "stopped" not in lines
    assert process.wait(60) == 1


def test_up_with_an_unknown_model_starts_nothing() -> None:
    """A typing mistake in --model is told at once, in one line."""
    command = [sys.executable, "-m", "kvpool.cli", "up", "--model", "gpt-9"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "gpt-9" in result.stderr
    assert "Traceback" not in result.stderr
    assert "started" not in result.stdout


def test_live_screen_shows_processes_and_events(toys: Callable[[ClusterOptions, str], Sequence[ProcessSpec]]) -> None:
    """On a terminal the table follows the cluster, below the events."""
    out = io.StringIO()
    screen = LiveScreen(Console(file=out, force_terminal=True, width=120, height=40))
    with LocalCluster(ClusterOptions(port=0), processes=toys, on_event=screen.say) as cluster:
        cluster.wait_ready(60)
        screen.show(cluster)
        screen.close()
    text = out.getvalue()
    assert "decode-0 started" in text
    assert "Processes" in text
    assert str(cluster.url) in text
    assert "running" in text
