"""What `make engines` installs can be used: the engines import beside kvpool's client, and a vLLM server serves the small model."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.testing.stock_process import VllmServer


def test_client_reaches_a_node_from_the_engines_interpreter(
    vllm_python: str, run_by: Callable[..., str], pool_node: Callable[..., object]
) -> None:
    """Connectors run in the engine's process, so the client must work with the engine's versions of its dependencies."""
    node = pool_node("--capacity", "64MiB")
    text = """if True:
        import sys, numpy as np, kvpool
        geometry = kvpool.Geometry.uniform(layers=2, kv_heads=1, head_dim=64, block_tokens=16, dtype="float32")
        namespace = kvpool.Namespace(model="m", revision="1", weights_digest=bytes(32), geometry=geometry, rope="none")
        with kvpool.connect(sys.argv[1], namespace=namespace) as pool:
            pool.put(range(32), np.ones((2, 2, 2, 1, 16, 64), "float32"))
            print(pool.get(range(32)).tokens)
    """
    assert run_by(vllm_python, text, node.address).strip() == "32"  # type: ignore[attr-defined]


@pytest.mark.timeout(900)
def test_vllm_serves_and_leaves_nothing_behind(vllm_server: Callable[..., VllmServer]) -> None:
    """The fixture others build on: healthy by its deadline, greedy, counted, and gone with all its processes and shared memory."""
    before = set(os.listdir("/dev/shm"))
    server = vllm_server()
    prompt = list(range(100, 400))
    first = server.complete(prompt, 4)
    again = server.complete(prompt, 4)
    assert first["tokens"] == again["tokens"]
    assert (first["cached"], again["cached"]) == (0, 256)
    assert server.counters()["vllm:prefix_cache_hits"] == 256
    server.stop()
    left = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith(("vllm", "psm_"))}
    assert left == set()


@pytest.mark.parametrize(("engine", "module"), [("lmcache", "lmcache.v1.distributed"), ("sglang", "sglang.srt.mem_cache.hicache_storage")])
def test_other_engines_import(engine: str, module: str, request: pytest.FixtureRequest, run_by: Callable[..., str]) -> None:
    """LMCache's server and SGLang's storage contract load without the packages for GPUs that they ask for."""
    python = request.getfixturevalue(f"{engine}_python")
    assert Path(shutil.which(python) or "").exists()
    assert run_by(python, f"import {module}; print({module}.__name__)").strip() == module
