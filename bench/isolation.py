"""Can a tenant find out, by timing, whether another tenant has the same prompt cached?

`python -m bench.isolation [--trials 2000] [--json]`: in every trial the victim first asks with a prompt: by a coin, the attacker's next
one ("cached") or one of its own ("not cached"), so that all else is equal. Then the attacker asks with its prompt and takes the time. AUC
is the chance that a time of a "cached" trial is the longer one: 0.5 tells nothing. As a control that this would show, a second user of
the victim's own tenant takes the same times; its AUC is far from 0.5, but for `lookup`, where a hit takes as long as a miss.

Rows: `sdk-lookup`, `sdk-get` and `sdk-put`, a tenant's SDK client of one node over TLS and gRPC, its only reach; and `ttft-REACH`, time to
first token of a router over HTTPS, whose workers reach the pool by REACH. The model is a small random Llama, so that trials are many.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import ssl
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import httpx
import numpy as np

import kvpool
from bench.report import print_json, print_table
from kvpool.block import Geometry, Namespace
from kvpool.cli.procs import ClusterOptions
from kvpool.cli.supervisor import LocalCluster
from kvpool.client.sdk import AsyncClient
from kvpool.security.tokens import new_token
from kvpool.testing.certificates import Authority
from kvpool.testing.node_process import NodeProcess
from kvpool.units import MIB
from kvpool.wire.credentials import Security

LOW, HIGH = 0.45, 0.55
PROMPT_TOKENS = 256
USERS = {"victim": "acme", "colleague": "acme", "attacker": "other"}
GEOMETRY = Geometry.uniform(layers=2, kv_heads=4, head_dim=32, block_tokens=16, dtype="float32")

Ask = Callable[[str, list[int]], Awaitable[tuple[float, int]]]
"""(user, prompt) -> seconds it took, tokens of it that were a hit."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to ask: how well each of the two outsiders can tell, and how often the attacker hit."""

    name: str
    auc: float
    control_auc: float
    attacker_hits: int
    trials: int


def auc(cached: Sequence[float], other: Sequence[float]) -> float:
    """The chance that one of `cached` is above one of `other`, ties counting half (Mann and Whitney's U over the product of the counts)."""
    values = np.concatenate([np.asarray(cached), np.asarray(other)])
    order = values.argsort(kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(1, len(values) + 1)
    for value in np.unique(values):
        same = values == value
        ranks[same] = ranks[same].mean()
    n, m = len(cached), len(other)
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * m))


async def trial(ask: dict[str, Ask], watcher: str, rng: random.Random, vocabulary: int, prime: str) -> tuple[bool, float, int]:
    """(cached?, seconds, hit tokens) of one trial of `watcher`; the victim primes by the ask called `prime`."""
    prompt, other = ([rng.randrange(3, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(2))
    cached = rng.random() < 0.5
    await ask[prime]("victim", prompt if cached else other)
    seconds, hit = await ask["probe"](watcher, prompt)
    return cached, seconds, hit


async def measure(name: str, ask: dict[str, Ask], trials: int, vocabulary: int) -> Row:
    """Trials of attacker and colleague by turns; the first few of each are not counted."""
    rng = random.Random(name)
    times: dict[tuple[str, bool], list[float]] = {(who, cached): [] for who in ("attacker", "colleague") for cached in (True, False)}
    hits = 0
    for number in range(trials + 10):
        for who in ("attacker", "colleague") if number % 4 == 0 else ("attacker",):
            cached, seconds, hit = await trial(ask, who, rng, vocabulary, "prime")
            hits += bool(hit) and who == "attacker"
            if number >= 10:
                times[who, cached].append(seconds)
    scores = {who: auc(times[who, True], times[who, False]) for who in ("attacker", "colleague")}
    return Row(name=name, auc=scores["attacker"], control_auc=scores["colleague"], attacker_hits=hits, trials=trials)


@contextlib.contextmanager
def site(directory: Path) -> Iterator[dict[str, str]]:
    """Certificates, tokens and a secret in `directory`, and the environment that switches them on; yields the users' tokens."""
    authority = Authority(directory)
    pair = authority.sign("server")
    table = directory / "tokens"
    _, own = new_token(table, name="deployment", tenant=None, rights=["read", "write", "map", "worker", "admin"], now_s=0)
    (directory / "own").write_text(own)
    (directory / "secret").write_bytes(os.urandom(32).hex().encode())
    users = {name: new_token(table, name=name, tenant=tenant, rights=["read", "write"], now_s=0)[1] for name, tenant in USERS.items()}
    files = {
        "TLS_CERT": pair.cert, "TLS_KEY": pair.key, "TLS_CA": authority.cert,
        "TOKEN_FILE": directory / "own", "TOKENS": table, "CLUSTER_SECRET": directory / "secret",
    }  # fmt: skip
    environment = {f"KVPOOL_{name}": str(path) for name, path in files.items()}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield users
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


async def measure_sdk(directory: Path, users: dict[str, str], trials: int) -> list[Row]:
    """A tenant's SDK against one node in a process of its own."""
    namespace = Namespace(model="bench", revision="1", weights_digest=bytes(32), geometry=GEOMETRY, rope="none")
    blocks = np.zeros((PROMPT_TOKENS // 16, 2, 2, 4, 16, 32), np.float32)
    node = NodeProcess("--capacity", str(256 * MIB), "--offer", "shm,grpc")
    try:
        clients: dict[str, AsyncClient] = {}
        for name, token in users.items():
            (directory / f"token-{name}").write_text(token)
            security = Security(tls_ca=directory / "ca.pem", token_file=directory / f"token-{name}")
            clients[name] = await kvpool.connect_async(node.address, namespace=namespace, security=security)

        async def put(user: str, prompt: list[int]) -> tuple[float, int]:
            began = time.perf_counter()
            await clients[user].put(prompt, blocks)
            return time.perf_counter() - began, 0

        async def get(user: str, prompt: list[int]) -> tuple[float, int]:
            began = time.perf_counter()
            got = await clients[user].get(prompt)
            return time.perf_counter() - began, got.tokens

        async def lookup(user: str, prompt: list[int]) -> tuple[float, int]:
            began = time.perf_counter()
            found = await clients[user].lookup(prompt)
            return time.perf_counter() - began, found

        probes: dict[str, Ask] = {"sdk-lookup": lookup, "sdk-get": get, "sdk-put": put}
        rows = [await measure(name, {"prime": put, "probe": probe}, trials, 1 << 16) for name, probe in probes.items()]
        for client in clients.values():
            await client.close()
    finally:
        node.stop()
    return rows


async def measure_http(users: dict[str, str], model: Path, reach: str, trials: int, vocabulary: int) -> Row:
    """Time to first token through a router; workers keep nothing to themselves, so every prefix comes by `reach`."""
    options = ClusterOptions(port=0, model=str(model), capacity_bytes=512 * MIB, transport=reach, resident_bytes=0)
    cluster = await asyncio.to_thread(LocalCluster, options)
    await asyncio.to_thread(cluster.start)
    try:
        await asyncio.to_thread(cluster.wait_ready)
        context = ssl.create_default_context(cafile=os.environ["KVPOOL_TLS_CA"])
        async with httpx.AsyncClient(base_url=cluster.url, verify=context, timeout=60) as http:

            async def ask(user: str, prompt: list[int]) -> tuple[float, int]:
                body = {"model": options.served_model_name, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True,
                        "stream_options": {"include_usage": True}}  # fmt: skip
                began, first, text = time.perf_counter(), 0.0, ""
                async with http.stream("POST", "/v1/completions", json=body, headers={"authorization": f"Bearer {users[user]}"}) as answer:
                    async for line in answer.aiter_lines():
                        first = first or time.perf_counter() - began
                        text += line + "\n"
                assert answer.status_code == 200, text
                return first, _cached_tokens(text)

            return await measure(f"ttft-{reach}", {"prime": ask, "probe": ask}, trials, vocabulary)
    finally:
        await asyncio.to_thread(cluster.stop)


def _cached_tokens(text: str) -> int:
    events: list[Any] = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return max(int((event.get("usage") or {}).get("prompt_tokens_details", {}).get("cached_tokens", 0)) for event in events)


def make_model(directory: Path) -> int:
    """A small random Llama with a tokenizer, in `directory`; its vocabulary."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from router.testing.model import tiny_model, write_tiny_model

    write_tiny_model(directory)
    text = tiny_model(directory)
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, vocab_size=320,
        max_position_embeddings=512, initializer_range=0.3, eos_token_id=text.stop_tokens[0], bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    return text.vocabulary


@click.command()
@click.option("--trials", default=2000, show_default=True, help="Trials of each row.")
@click.option("--reach", "reaches", multiple=True, default=("shm", "grpc"), show_default=True, help="How workers reach the pool.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
def main(trials: int, reaches: tuple[str, ...], as_json: bool) -> None:
    """Measure, print; exit code 1 when an outsider can tell, or hit."""
    with tempfile.TemporaryDirectory() as name, site(Path(name)) as users:
        directory = Path(name)
        rows = asyncio.run(measure_sdk(directory, users, trials))
        if reaches:
            model = directory / "model"
            model.mkdir()
            vocabulary = make_model(model)
            rows += [asyncio.run(measure_http(users, model, reach, trials, vocabulary)) for reach in reaches]
    print_table(
        ("asked by", "attacker AUC", "same tenant AUC", "attacker's hits", "trials"),
        [(row.name, f"{row.auc:.3f}", f"{row.control_auc:.3f}", row.attacker_hits, row.trials) for row in rows],
    )
    if as_json:
        print_json({
            "auc": {row.name: row.auc for row in rows},
            "control_auc": {row.name: row.control_auc for row in rows},
            "attacker_hits": sum(row.attacker_hits for row in rows),
            "rows": [dataclasses.asdict(row) for row in rows],
        })  # fmt: skip
    apart = all(LOW <= row.auc <= HIGH and row.attacker_hits == 0 for row in rows)
    sys.exit(0 if apart else 1)


if __name__ == "__main__":
    main()
