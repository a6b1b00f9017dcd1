"""`kvpool connect-check` as a command: a stand-in for an installed vLLM, run by an interpreter of its own, and a real pool node."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvpool.cli.main import cli
from kvpool.connectors.check.pool import look
from kvpool.testing.node_process import NodeProcess
from kvpool.testing.stock_process import free_ports
from kvpool.testing.vllm_stand_in import write_distribution, write_vllm
from kvpool.wire.credentials import PLAIN

ROOT = Path(__file__).parents[2]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the engine's interpreter finds packages before all others."""
    directory = tmp_path / "packages"
    directory.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (directory, ROOT))))
    return directory


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["connect-check", *arguments])


def states(result: Result) -> dict[str, Any]:
    return {line["what"]: line["state"] for line in json.loads(result.output)["lines"]}


def test_engine_that_will_work_ends_with_0(packages: Path, tmp_path: Path) -> None:
    """The whole way: probe, configuration made from the pool's address, a look at the node; the flag to start with is printed."""
    write_vllm(packages)
    (tmp_path / "model.safetensors").touch()
    node = NodeProcess("--capacity", "64MiB")
    try:
        flags = ("--", "--model", str(tmp_path), "--block-size", "32")
        result = run("vllm", "--python", sys.executable, "--pool", node.address, "--json", *flags)
        assert result.exit_code == 0, result.output
        assert set(states(result).values()) == {"ok"}
        answer = json.loads(result.output)
        found = {line["what"]: line["found"] for line in answer["lines"]}
        assert "reached by shm" in found["pool"]
        assert found["blocks"].startswith("32 tokens")
        assert json.loads(answer["start_with"][1])["kv_connector_extra_config"] == {"pool": node.address}
        half = asyncio.run(look(f"{node.address},127.0.0.1:9", "auto", PLAIN, 5.0))
        assert [(one.reach, bool(one.error)) for one in half] == [("shm", False), ("", True)]
    finally:
        node.stop()


def test_engine_that_will_not_work_ends_with_3(packages: Path) -> None:
    """A method that no connector has, flags that are none, a pool that isn't there: each has its line, and the table says what to do."""
    write_vllm(packages, wants="dance")
    config = json.dumps({"kv_connector": "KvpoolConnector", "kv_role": "both", "kv_connector_extra_config": {"pool": "127.0.0.1:9"}})
    arguments = ("vllm", "--python", sys.executable, "--config", config)
    result = run(*arguments, "-o", "json", "--", "--blok-size", "32")
    assert result.exit_code == 3
    found = states(result)
    assert {name for name, state in found.items() if state == "fail"} == {"connector", "config", "flags", "pool"}
    words = {line["what"]: line["found"] for line in json.loads(result.output)["lines"]}
    assert "lacks dance" in words["connector"]
    assert "--blok-size" in words["flags"]


def test_interpreter_that_lacks_everything_is_told(packages: Path) -> None:
    """The first thing that goes wrong in practice: another environment than the engine's."""
    write_distribution(packages, "vllm", "0.1.0")
    result = run("vllm", "--python", str(packages / "none"), "--pool", "127.0.0.1:9")
    assert result.exit_code == 3
    assert "can't be run" in result.output
    assert "--python" in result.output
    broken = packages / "python"
    broken.write_text("#!/bin/sh\necho nonsense\nexit 4\n")
    broken.chmod(0o755)
    assert "status 4" in run("sglang", "--python", str(broken), "--pool", "127.0.0.1:9").output


def test_lmcache_finds_the_door_for_clients_of_redis(packages: Path) -> None:
    """With `resp` there is no kvpool in LMCache's process: what is to be seen is the port, and who answers at it."""
    write_distribution(packages, "lmcache", "0.5.6")
    (port,) = free_ports(1)
    config = json.dumps({"type": "resp", "host": "127.0.0.1", "port": port})
    arguments = ("lmcache", "--python", sys.executable, "--config", config, "--json")
    away = run(*arguments)
    assert (away.exit_code, states(away)["pool"]) == (3, "fail")
    node = NodeProcess("--capacity", "64MiB", "--resp-port", str(port))
    try:
        there = run(*arguments)
        assert (there.exit_code, set(states(there).values())) == (0, {"ok"}), there.output
    finally:
        node.stop()
