"""`kvpool connect-check` with the engines themselves: what is right is said to be, what is wrong is found before anything is started."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvpool.cli.main import cli
from kvpool.testing.node_process import NodeProcess

ROOT = Path(__file__).parents[2]


@pytest.fixture
def check(
    pool_node: Callable[..., NodeProcess], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, dict[str, Mapping[str, str]]]]:
    """Check an engine against a node; the exit status, and the answers by what they are about."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    node = pool_node("--capacity", "256MiB")

    def run(engine: str, python: str, *arguments: str) -> tuple[int, dict[str, Mapping[str, str]]]:
        result = CliRunner().invoke(cli, ["connect-check", engine, "--python", python, "--pool", node.address, "--json", *arguments])
        return result.exit_code, {line["what"]: line for line in json.loads(result.output)["lines"]}

    return run


def test_vllm_is_read_by_its_own_parser(vllm_python: str, small_model: Path, check: Callable[..., Any]) -> None:
    """vLLM itself says what it makes of its flags, and the connector what it makes of vLLM."""
    status, found = check("vllm", vllm_python, "--", "--model", str(small_model), "--max-model-len", "2048", "--block-size", "64")
    assert status == 0, found
    assert {line["state"] for line in found.values()} == {"ok"}
    assert found["blocks"]["found"].startswith("64 tokens, 1.41 MiB a block")
    assert len(found["namespace"]["found"].split()[0]) == 16

    config = json.dumps({"kv_connector": "KvpoolConnector", "kv_role": "both", "kv_connector_module_path": "kvpool.connectors.vllm"})
    status, found = check("vllm", vllm_python, "--config", config, "--", "--model", str(small_model), "--no-enable-prefix-caching")
    assert status == 3
    assert found["config"]["state"] == found["keys"]["state"] == "fail"
    assert found["connector"]["state"] == "ok"


def test_lmcache_and_sglang_take_their_connectors(lmcache_python: str, sglang_python: str, check: Callable[..., Any]) -> None:
    """Both contracts are the installed packages' own."""
    for engine, python in (("lmcache", lmcache_python), ("sglang", sglang_python)):
        status, found = check(engine, python)
        assert status == 0, found
        assert found["connector"]["state"] == found[engine]["state"] == "ok", found
