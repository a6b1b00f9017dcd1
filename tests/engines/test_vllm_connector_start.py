"""`KvpoolConnector` as vLLM makes it, without a server: what it refuses, and what it hands to vLLM in vLLM's own types."""

import json
from collections.abc import Callable
from typing import Any

import pytest

START = """if True:
    import json, sys
    from types import SimpleNamespace as N
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole, supports_hma
    from kvpool.connectors.vllm import KvpoolConnector
    import kvpool.connectors.vllm.connector as connector

    said = json.loads(sys.argv[1])
    connector.VLLM = said.pop("version", connector.VLLM)
    groups = [N(kv_cache_spec=N(block_size=16))] * said.pop("groups", 1)
    transfer = KVTransferConfig(kv_connector="KvpoolConnector", kv_role="kv_both", **said)
    config = N(
        kv_transfer_config=transfer,
        kv_events_config=N(enable_kv_cache_events=True),
        parallel_config=N(world_size=said.pop("ranks", 1)),
        cache_config=N(prefix_caching_hash_algo="sha256"),
    )
    try:
        made = KvpoolConnector(vllm_config=config, role=KVConnectorRole.SCHEDULER, kv_cache_config=N(kv_cache_groups=groups))
    except Exception as error:
        print(type(error).__name__, error)
        sys.exit()
"""


def started(run_by: Callable[..., str], python: str, text: str = "", **said: Any) -> str:
    """What comes of starting with `said` of `KVTransferConfig`, and of `text` behind it."""
    return run_by(python, START + text, json.dumps({"kv_load_failure_policy": "recompute", **said})).strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({}, "say where the pool is"),
        ({"kv_load_failure_policy": "fail"}, '"kv_load_failure_policy":"recompute"'),
        ({"version": "0.28.0"}, "vLLM 0.28.0 is not one that this connector was tested with: install vllm >= 0.32, < 0.33"),
        ({"groups": 2}, "--disable-hybrid-kv-cache-manager"),
    ],
)
def test_wrong_start_says_what_to_do(said: dict[str, Any], error: str, vllm_python: str, run_by: Callable[..., str]) -> None:
    """At the start, not at the first request."""
    extra: dict[str, Any] = {} if error.startswith("say") else {"kv_connector_extra_config": {"pool": "127.0.0.1:7000"}}
    found = started(run_by, vllm_python, **extra, **said)
    assert found.startswith("ConfigError")
    assert error in found


def test_events_metrics_and_promises_in_the_types_of_vllm(vllm_python: str, run_by: Callable[..., str]) -> None:
    """Events spell hashes as the engine's own do; counts pass through vLLM's registry; nothing has to be delivered."""
    text = """
    import msgspec
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, REGISTRY
    from kvpool.connectors.vllm.requests import Story
    from kvpool.connectors.vllm.stats import COUNTS
    made._scheduler.stories.append(Story(bytes(31) + b"1", [bytes(31) + b"2"], list(range(16)), None))
    (event,) = made.take_events()
    assert list(made.take_events()) == []
    spelled = msgspec.json.decode(msgspec.json.encode(event))
    assert spelled["block_hashes"] == [0x32] and spelled["parent_block_hash"] == 0x31, spelled
    assert (spelled["medium"], spelled["locality"], spelled["ownership"]) == ("STORAGE", "REMOTE", "kvpool"), spelled
    assert made.requires_kv_delivery is False and supports_hma(KvpoolConnector)
    assert made.reset_cache() is True
    one, other = (KvpoolConnector.build_kv_connector_stats({"loads": n, "held_blocks": n}) for n in (1, 2))
    assert one.aggregate(other).data == {"loads": 3, "held_blocks": 2} and not one.is_empty()
    kinds = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    metrics = KvpoolConnector.build_prom_metrics(config, kinds, ["engine"], {0: ["0"]})
    metrics.observe(one.data, 0)
    assert REGISTRY.get_sample_value("vllm:kvpool_loads_total", {"engine": "0"}) == 3
    assert REGISTRY.get_sample_value("vllm:kvpool_held_blocks", {"engine": "0"}) == 2
    made.shutdown()
    print("good")
"""
    extra: dict[str, Any] = {"kv_connector_extra_config": {"pool": "127.0.0.1:7000"}}
    assert started(run_by, vllm_python, text, **extra) == "good"
