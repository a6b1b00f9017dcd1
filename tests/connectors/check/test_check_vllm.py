"""What the check says of vLLM: planted faults in the facts, in the configuration and in the pool, each with its line."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from kvpool.connectors.check.engines import plan_vllm
from kvpool.connectors.check.lines import Line
from kvpool.connectors.check.pool import NodeSeen
from kvpool.errors import ConfigError
from kvpool.request.pool import NodeDescription
from kvpool.units import GIB, MIB

POOL = "127.0.0.1:7070"
GOOD: dict[str, Any] = {
    "python": {"value": {"version": "3.11.7", "hash_seed": ""}},
    "engine": {"value": "0.32.0+cpu"},
    "kvpool": {"value": {"version": "0.1.0", "path": "/somewhere"}},
    "connector": {"value": {"is_one": True, "missing": [], "unlike": [], "constructor": 3, "bases": ["KvpoolConnector", "SupportsHMA"]}},
    "transfer": {"value": True},
}
FLAGS: dict[str, Any] = {
    "block_tokens": 128, "hash": "sha256", "prefix_caching": True, "dtype": "torch.bfloat16", "cache_dtype": "auto", "tokens": 2048,
    "tensor": 1, "pipeline": 1, "context": 1, "hybrid": False, "latent": False, "layers": 30, "heads": 3, "head": 64, "load_format": "auto",
    "model": "/nowhere", "sliding": 0, "identity": "1234",
}  # fmt: skip


def node(capacity: int = GIB, reach: str = "shm") -> NodeSeen:
    books = NodeDescription(
        node_id="ab" * 16, incarnation=1, capacity_bytes=capacity, free_bytes=capacity, used_bytes=0, pinned_bytes=0, blocks=0,
        read_leases=0, write_leases=0,
    )  # fmt: skip
    return NodeSeen(address=POOL, description=books, reach=reach)


def lines(
    facts: Mapping[str, Any] = {},
    transfer: Mapping[str, Any] = {},
    flags: Mapping[str, Any] = {},
    *,
    seen: NodeSeen | None = None,
    trouble: str = "",
    environment: Mapping[str, str] = {},
) -> dict[str, Line]:
    """The answers by what they are about, the worst of each, to a good setup with some changes."""
    config: dict[str, Any] = {
        "kv_connector": "KvpoolConnector",
        "kv_connector_module_path": "kvpool.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pool": POOL, "weights": "made up"},
        **transfer,
    }
    plan = plan_vllm(json.dumps(config), None, ["--model", "/nowhere"])
    found = plan.lines(
        {**GOOD, "flags": {"value": {**FLAGS, **flags}}, **facts}, None if trouble else [seen or node()], trouble, environment
    )
    rank = ("ok", "warn", "fail")
    return {line.what: line for line in sorted(found, key=lambda line: rank.index(line.state))}


def test_good_setup_has_nothing_to_do() -> None:
    """Nobody should be sent to mend what works."""
    found = lines()
    assert {line.state for line in found.values()} == {"ok"}
    assert {line.todo for line in found.values()} == {""}
    assert set(found) == {"python", "kvpool", "vllm", "connector", "config", "keys", "layers", "blocks", "weights", "namespace", "pool"}


@pytest.mark.parametrize(
    ("facts", "what", "state", "words"),
    [
        ({"python": {"error": "no such file"}}, "python", "fail", "--python"),
        ({"python": {"value": {"version": "3.10.1"}}}, "python", "fail", "3.11"),
        ({"engine": {"error": "no package vllm is installed"}}, "vllm", "fail", "install vllm >= 0.32"),
        ({"engine": {"value": "0.16.0"}}, "vllm", "fail", "untested_vllm"),
        ({"engine": {"value": "dev"}}, "vllm", "fail", "install vllm"),
        ({"kvpool": {"error": "ModuleNotFoundError: kvpool"}}, "kvpool", "fail", "PYTHONPATH"),
        ({"kvpool": {"value": {"version": "0.0.9", "path": "/old"}}}, "kvpool", "warn", "one version"),
        ({"connector": {"error": "ImportError: x"}}, "connector", "fail", "kv_connector_module_path"),
        ({"connector": {"value": {**GOOD["connector"]["value"], "missing": ["new_one"]}}}, "connector", "fail", "tested with this vLLM"),
        ({"connector": {"value": {**GOOD["connector"]["value"], "unlike": ["wait_for_save"]}}}, "connector", "fail", "tested"),
        ({"connector": {"value": {**GOOD["connector"]["value"], "constructor": 2}}}, "connector", "fail", "tested"),
        ({"connector": {"value": {**GOOD["connector"]["value"], "bases": []}}}, "connector", "warn", "hybrid-kv-cache"),
        ({"transfer": {"error": "ValueError: unsupported kv_role"}}, "config", "fail", "--kv-transfer-config"),
        ({"flags": {"error": "ValueError: unrecognized arguments"}}, "flags", "fail", "vllm serve"),
    ],
)
def test_fault_of_the_interpreter_has_its_line(facts: Mapping[str, Any], what: str, state: str, words: str) -> None:
    """Each thing that can be wrong with what is installed is named, and so is what to do."""
    found = lines(facts)[what]
    assert found.state == state
    assert words in found.todo


@pytest.mark.parametrize(
    ("transfer", "state", "words"),
    [
        ({"kv_load_failure_policy": "fail"}, "fail", '"kv_load_failure_policy":"recompute"'),
        ({"kv_load_failure_policy": "fail", "kv_connector_extra_config": {"pool": POOL, "fail_on_lost_load": True}}, "warn", "recompute"),
        ({"kv_role": "kv_producer"}, "warn", "kv_both"),
        ({"kv_role": "both"}, "fail", "kv_both"),
        ({"kv_connector": "OtherConnector"}, "fail", "KvpoolConnector"),
        ({"kv_connector_extra_config": {"pool": POOL, "colour": 1}}, "fail", "kv_connector_extra_config"),
        ({"kv_connector_extra_config": {}}, "fail", "kv_connector_extra_config"),
    ],
)
def test_fault_of_the_configuration_has_its_line(transfer: Mapping[str, Any], state: str, words: str) -> None:
    """A wrong word in the configuration is found before an engine has loaded its weights for it."""
    found = lines(transfer=transfer)["config"]
    assert found.state == state
    assert words in found.todo


@pytest.mark.parametrize(
    ("flags", "what", "state", "words"),
    [
        ({"prefix_caching": False}, "keys", "fail", "--no-enable-prefix-caching"),
        ({"hash": "xxhash"}, "keys", "warn", "sha256"),
        ({"hybrid": True}, "layers", "fail", "can't be stored"),
        ({"sliding": 4096}, "layers", "warn", "--disable-hybrid-kv-cache-manager"),
        ({"context": 2}, "ranks", "fail", "context parallel"),
        ({"block_tokens": 1024}, "blocks", "fail", "--block-size 512"),
        ({"tokens": 10_000_000}, "blocks", "warn", "--capacity"),
        ({"layers": 20_000}, "blocks", "fail", "--capacity"),
        ({"load_format": "dummy"}, "weights", "ok", ""),
        ({"identity": ""}, "namespace", "warn", "connector"),
    ],
)
def test_fault_of_the_flags_has_its_line(flags: Mapping[str, Any], what: str, state: str, words: str) -> None:
    """What vLLM makes of its flags may not go with a pool, although vLLM itself would start."""
    found = lines(flags=flags)[what]
    assert (found.state, words in found.todo) == (state, True)


def test_weights_that_cannot_be_told_apart_are_a_fault() -> None:
    """Two engines with other weights would take each other's blocks."""
    bare = {"kv_connector_extra_config": {"pool": POOL}}
    assert lines(transfer=bare, flags={"load_format": "dummy"})["weights"].state == "fail"
    assert lines(transfer=bare)["weights"].state == "warn", "no directory here, but perhaps a snapshot"


def test_hashes_seeded_at_random_are_told() -> None:
    """Before 0.31 equal tokens have other hashes in each process, unless PYTHONHASHSEED is set."""
    old = {"engine": {"value": "0.28.0"}}
    extra = {"kv_connector_extra_config": {"pool": POOL, "untested_vllm": True}}
    assert lines(old, extra)["keys"].state == "warn"
    assert lines(old, extra, environment={"PYTHONHASHSEED": "0"})["keys"].state == "ok"
    assert lines(old, extra)["vllm"].state == "warn"


def test_more_ranks_take_some_settings_only() -> None:
    """Loads within a step are for one rank."""
    assert lines(flags={"tensor": 2})["ranks"].state == "ok"
    extra = {"kv_connector_extra_config": {"pool": POOL, "load": "layers"}}
    assert lines(transfer=extra, flags={"tensor": 2})["ranks"].state == "fail"


def test_pool_that_is_not_there_or_far_is_told() -> None:
    """Without a pool the engine works, and saves nothing."""
    assert lines(trouble="nobody answers")["pool"].state == "fail"
    assert lines(seen=NodeSeen(address=POOL, error="refused"))["pool"].state == "fail"
    assert lines(seen=node(reach="grpc"))["pool"].state == "warn"
    assert lines(seen=node(capacity=4 * MIB))["blocks"].state == "fail"


def test_plan_takes_the_configuration_from_the_flags() -> None:
    """An operator pastes the command line that he is about to start."""
    config = json.dumps({"kv_connector": "KvpoolConnector", "kv_connector_extra_config": {"load": "sync"}})
    for spelled in (["--kv-transfer-config", config], [f"--kv-transfer-config={config}"]):
        plan = plan_vllm(None, POOL, ["--model", "m", *spelled, "--block-size", "64"])
        assert plan.asked["flags"] == ["--model", "m", "--block-size", "64"]
        assert plan.asked["transfer"]["kv_connector_extra_config"] == {"load": "sync", "pool": POOL}
        assert plan.pool == POOL
    with pytest.raises(ConfigError, match="no value"):
        plan_vllm(None, POOL, ["--kv-transfer-config"])
    with pytest.raises(ConfigError, match="not JSON"):
        plan_vllm("{", POOL, [])
