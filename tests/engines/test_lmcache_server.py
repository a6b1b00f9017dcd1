"""LMCache's server with the pool as its L2, under vLLM: what is in the pool outlives both, and a pool that dies costs no answer."""

import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvpool.testing.killing_relay import KillingRelay
from kvpool.testing.node_process import NodeProcess, poll
from kvpool.testing.stock_process import LmcacheServer, VllmServer
from kvpool.units import MIB

from .conftest import ROOT

CHUNKS, CHUNK_TOKENS = 3, 256
"""Whole chunks of LMCache's in a prompt of 1,000 tokens; each is 5.6 MiB of SmolLM2's KV."""


@pytest.fixture
def lmcache_server(lmcache_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], LmcacheServer]]:
    """Start LMCache's server with a pool as its L2."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with ExitStack() as stack:

        def start(pool: str, **params: Any) -> LmcacheServer:
            spec = {"type": "plugin", "module_path": "kvpool.connectors.lmcache", "class_name": "KvpoolL2"}
            l2 = json.dumps({**spec, "adapter_params": {"pool": pool, **params}})
            server = LmcacheServer(lmcache_python, tmp_path / "lmcache.log", flags=["--l2-adapter", l2])
            stack.callback(server.stop)
            return server.start()

        yield start


def books(server: LmcacheServer) -> dict[str, Any]:
    """What the adapter counts, as LMCache's status page shows it."""
    (adapter,) = json.loads(server.ask("/status"))["storage_manager"]["l2_adapters"]
    return dict(adapter)


@pytest.mark.timeout(900)
def test_prompt_outlives_server_and_engine_and_a_dead_pool_costs_no_answer(
    vllm_server: Callable[..., VllmServer], lmcache_server: Callable[..., LmcacheServer], pool_node: Callable[..., NodeProcess]
) -> None:
    """Both are started anew: three chunks of the prompt come from the pool. Then the node dies amid the load: the same answer, computed."""
    node = pool_node("--capacity", "256MiB", "--offer", "grpc")
    rng = random.Random(5)
    prompt, other = ([rng.randrange(100, 48_000) for _ in range(tokens)] for tokens in (1000, 300))
    with KillingRelay(node.address, node.kill) as relay:
        cache = lmcache_server(relay.address, transport="grpc")
        engine = vllm_server(transfer=cache.transfer)
        computed = engine.complete(prompt, 16)
        poll(lambda: books(cache)["stored"] == CHUNKS, "LMCache stores its chunks")
        engine.stop()
        cache.stop()

        cache = lmcache_server(relay.address, transport="grpc")
        engine = vllm_server(transfer=cache.transfer)
        taken = engine.complete(prompt, 16)
        assert taken["tokens"] == computed["tokens"]
        assert taken["cached"] == CHUNKS * CHUNK_TOKENS
        assert books(cache)["loaded"] == CHUNKS

        engine.forget()
        relay.arm(8 * MIB)
        assert engine.complete(prompt, 16)["tokens"] == computed["tokens"]
        assert relay.killed.is_set()
        assert books(cache)["not_loaded"] > 0
        assert engine.complete(other, 4)["cached"] == 0
        assert books(cache)["is_healthy"]
