"""LMCache itself on real nodes: the plugin by LMCache's loader, and `lmcache bench l2` over both ways in."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpool.testing.l2_kit import CHECKS
from kvpool.testing.node_process import NodeProcess

from .conftest import ROOT

Node = Callable[..., NodeProcess]


def plugin(pool: str, **params: Any) -> dict[str, Any]:
    """What `--l2-adapter` is given."""
    spec = {"type": "plugin", "module_path": "kvpool.connectors.lmcache", "class_name": "KvpoolL2"}
    return {**spec, "adapter_params": {"pool": pool, **params}}


def bench_l2(python: str, spec: dict[str, Any], result: Path) -> dict[str, dict[str, Any]]:
    """`lmcache bench l2`, verified; what it says of each operation."""
    argv = [python, "-m", "lmcache.cli.main", "bench", "l2", "--no-skip-verify", "--l2-adapter", json.dumps(spec)]
    argv += ["--num-keys", "8", "--data-size-kb", "1024", "--rounds", "2", "--in-flight", "2", "--lookup-max-hit-rate", "0.5"]
    argv += ["--format", "json", "--output", str(result)]
    done = subprocess.run(argv, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    said = json.loads(result.read_text())["metrics"]
    return {part["operation"]: part for name, part in said.items() if name.startswith("op_")}


def passed(said: dict[str, dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """(keys that succeeded, keys) by operation."""
    assert not any(part["rounds_timed_out"] for part in said.values())
    return {name: (part["total_success"], part["total_keys"]) for name, part in said.items()}


ALL_GOOD = {"Store": (32, 32), "Lookup": (16, 32), "Load": (32, 32)}
"""Half of the keys looked up were never stored."""


def test_adapter_keeps_the_contract_with_lmcaches_own_classes(lmcache_python: str, pool_node: Node) -> None:
    """The kit of `tests/connectors`, so that the stand-ins there can't drift; made by LMCache's plugin loader."""
    done = subprocess.run(
        [lmcache_python, "-m", "kvpool.testing.lmcache_real", pool_node("--capacity", "128MiB").address],
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line for line in done.stdout.splitlines() if "LMCache" not in line] == [check.__name__ for check in CHECKS]


def test_lmcaches_bench_passes_over_one_node_and_over_two(lmcache_python: str, pool_node: Node, tmp_path: Path) -> None:
    """`lmcache bench l2 --no-skip-verify`, in memory of this host, then spread over two nodes, one of them reached by TCP only."""
    first = pool_node("--capacity", "256MiB")
    assert passed(bench_l2(lmcache_python, plugin(first.address, scope="one"), tmp_path / "one.json")) == ALL_GOOD
    second = pool_node("--capacity", "256MiB", "--offer", "tcp,grpc")
    both = plugin(f"{first.address},{second.address}", scope="two")
    assert passed(bench_l2(lmcache_python, both, tmp_path / "two.json")) == ALL_GOOD


def test_lmcaches_own_resp_adapter_passes_at_the_resp_port(lmcache_python: str, pool_node: Node, tmp_path: Path) -> None:
    """The way in without a plugin: LMCache's native client of Redis, a connection for each of its threads."""
    node = pool_node("--capacity", "256MiB", "--resp-port", "0")
    (port,) = [int(found[1]) for line in node.log if (found := re.search(r"clients of Redis in at \S+:(\d+)", line))]
    assert passed(bench_l2(lmcache_python, {"type": "resp", "host": "127.0.0.1", "port": port}, tmp_path / "resp.json")) == ALL_GOOD


def test_pool_that_is_away_fails_no_bench(lmcache_python: str, tmp_path: Path) -> None:
    """Nothing is stored, found or loaded, each task ends, and so does the command: its check of the bytes says what is missing."""
    spec = plugin("127.0.0.1:1", timeout_s=1.0)
    argv = [lmcache_python, "-m", "lmcache.cli.main", "bench", "l2", "--l2-adapter", json.dumps(spec), "--num-keys", "2"]
    argv += ["--data-size-kb", "64", "--format", "json", "--output", str(tmp_path / "away.json")]
    subprocess.run(argv, env={"PYTHONPATH": str(ROOT), "PATH": ""}, capture_output=True, timeout=120, check=True)
    said = json.loads((tmp_path / "away.json").read_text())["metrics"]
    assert [said[name]["total_success"] for name in ("op_0", "op_1", "op_2")] == [0, 0, 0]
    assert not any(said[name]["rounds_timed_out"] for name in ("op_0", "op_1", "op_2"))
