"""Attention techniques from OpenAI's endpoint to the decode worker: a real router, workers and a pool node, on a tiny model."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from time import monotonic_ns
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvpool.cluster import Membership, open_membership
from kvpool.engine.attention.network import new_session, score, use_sessions
from kvpool.engine.attention.settings import parse_attention
from kvpool.engine.model import load_model
from kvpool.engine.settings import EngineSettings, WorkerConfig
from kvpool.engine.worker import WorkerApp
from kvpool.node.service import NodeConfig, PoolNode
from kvpool.units import MIB, SECOND
from kvpool.wire.pool_client import PoolRpc
from kvpool.wire.worker_client import WorkerClient
from router.pool import NodesProbe
from router.testing.model import NAME, tiny_model
from router.testing.server import serving

PROMPT = tuple((31 * i * i + 7) % 250 for i in range(77))
OWN = "streaming:budget=0.3,sinks=4,positions=cache"
CHOSEN = ["h2o:budget=0.3", "snapkv:budget=0.3,window=8", "quest:budget=16,page=4,dense=0", "full"]
SETTINGS = EngineSettings(chunk_tokens=128, resident_bytes=0, kv_bytes=64 * MIB)


class Cluster:
    """A membership as the router's test server wants it."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def __getattr__(self, name: str) -> Any:
        return getattr(self._membership, name)

    def connect(self, address: str) -> WorkerClient:
        return WorkerClient(address)


def expected(tiny: Path, text: str, count: int) -> list[int]:
    """Greedy, by a `transformers` model under a session, with nothing of the engine."""
    network: Any = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    use_sessions(network)
    asked, cache = parse_attention(text), DynamicCache()
    session = None if asked is None else new_session(network, asked)
    tokens = [int(score(network, cache, PROMPT, session)[-1].argmax())]
    if session is not None:
        session.settle(len(PROMPT))
    while len(tokens) < count:
        tokens.append(int(score(network, cache, tokens[-1:], session)[-1].argmax()))
    return tokens


@pytest.fixture
async def url(tiny: Path, tmp_path: Path) -> AsyncIterator[str]:
    """A router's, over a pool node, a prefill worker, and a decode worker whose own technique is StreamingLLM."""
    model = load_model(tiny, dtype="float32", block_tokens=8)
    cluster = f"memory://techniques-{uuid.uuid4().hex}?lease_ms=500"
    async with AsyncExitStack() as stack:
        watcher = await asyncio.to_thread(open_membership, cluster)
        stack.callback(watcher.close)
        member = await asyncio.to_thread(open_membership, cluster)
        stack.callback(member.close)
        node = PoolNode(NodeConfig(capacity_bytes=16 * MIB, arena_directory=tmp_path, offers=("shm", "grpc")), member)
        stack.push_async_callback(node.stop)
        await node.start()
        for role, settings in (("prefill", SETTINGS), ("decode", replace(SETTINGS, attention=parse_attention(OWN)))):
            config: dict[str, Any] = {"role": role, "served_name": NAME, "cluster": cluster, "drain_s": 0.5, "settings": settings}
            app = WorkerApp(WorkerConfig(**config), model)
            stack.push_async_callback(app.stop)
            await app.start()
            await app.joined()
        await asyncio.to_thread(watcher.wait, lambda view: len(view) == 3, monotonic_ns() + 10 * SECOND)
        view: Any = Cluster(watcher)
        probe = NodesProbe(watcher, PoolRpc)
        choices = frozenset({"h2o", "snapkv", "quest", "full"})
        (tmp_path / "tokenizer").mkdir()
        text = tiny_model(tmp_path / "tokenizer")
        running = await stack.enter_async_context(serving(text, view, probe=probe, attention_choices=choices))
        yield running.url


async def test_each_technique_through_the_endpoint_gives_the_tokens_of_the_reference(url: str, tiny: Path) -> None:
    """The worker's own for who doesn't choose, else the request's; n answers; the prompt by way of the pool as far as that is of use."""
    body = {"model": NAME, "prompt": list(PROMPT), "max_tokens": 10, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    pooled = {}
    async with httpx.AsyncClient(timeout=60) as client:

        async def ask(**fields: Any) -> Any:
            return (await client.post(f"{url}/v1/completions", json={**body, **fields})).json()

        for text in ("", *CHOSEN):
            found = (await ask(**({"kvpool_attention": text} if text else {})))["kvpool"]
            assert found["token_ids"] == expected(tiny, text or OWN, 10)
            assert parse_attention(found["attention"]) == parse_attention(text or OWN)
            pooled[text] = (found["prefill_worker"] is not None, found["decode_sources"]["pool"])
        twice = (await ask(kvpool_attention=CHOSEN[2], n=2))["kvpool"]["choices"]
        assert [one["token_ids"] for one in twice] == [expected(tiny, CHOSEN[2], 10)] * 2
        refused = await ask(kvpool_attention="streaming")
    assert pooled == {"": (True, 76), CHOSEN[0]: (False, 0), CHOSEN[1]: (True, 69), CHOSEN[2]: (True, 76), "full": (True, 77)}
    assert "may choose full, h2o, snapkv, quest" in refused["error"]["message"]
