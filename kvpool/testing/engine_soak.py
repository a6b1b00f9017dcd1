"""A decode worker's engine at full memory for as long as you like: 64 requests at a time where two or three fit.

`python -m kvpool.testing.engine_soak [--minutes 10] [--layout paged]`: a tiny random model, requests of all lengths that share beginnings,
hang-ups, a pool that fails at times. Every answer that is not cut short is compared with `transformers`; at the end all blocks must be
back, and the process must not have grown by more than `GROWTH_BYTES` since its first tenth. Exits with 1 and a reason otherwise.
"""

import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch

from kvpool.engine.engine import Engine
from kvpool.engine.model import load_model
from kvpool.engine.reference import Reference
from kvpool.engine.settings import EngineSettings, Layout
from kvpool.engine.store import MemoryStore
from kvpool.request import DecodeRequest, TokenOut
from kvpool.units import MIB, SECOND

STREAMS, CASES, TOKENS, BLOCK_TOKENS = 64, 60, 60, 64
GROWTH_BYTES = 48 * MIB


def tiny_model(directory: Path) -> Path:
    """A random two-layer Llama, saved in `directory`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=256,
        max_position_embeddings=512, initializer_range=0.3, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def resident_bytes() -> int:
    """What this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def soak(directory: Path, seconds: float, layout: Layout) -> str:
    """Serve for `seconds`; what was wrong, or nothing."""
    rng = random.Random(0)
    model = load_model(directory, dtype="float32", block_tokens=BLOCK_TOKENS)
    reference = Reference(directory, "float32")
    trunks = [tuple(rng.choices(range(256), k=200)) for _ in range(3)]
    cases: list[tuple[tuple[int, ...], list[int]]] = []
    for _ in range(CASES):
        prompt = (*rng.choice(trunks)[: rng.choice((0, 64, 128, 200))], *rng.choices(range(256), k=rng.randrange(1, 90)))
        cases.append((prompt, reference.generate(list(prompt), TOKENS)))
    store = MemoryStore(model.geometry.bytes_per_token)
    settings = EngineSettings(
        kv_bytes=9 * BLOCK_TOKENS * model.geometry.bytes_per_token, resident_bytes=1 << 16, max_active=STREAMS, layout=layout
    )
    engine = Engine(model, store, settings)
    end, served, marks = time.monotonic() + seconds, 0, [resident_bytes()]

    async def client() -> str:
        nonlocal served
        while time.monotonic() < end:
            prompt, expected = rng.choice(cases)
            patience = rng.choice((TOKENS, TOKENS, rng.randrange(1, TOKENS)))
            tokens: list[int] = []
            stream: Any = engine.decode(DecodeRequest(request_id="s", prompt=prompt, max_tokens=TOKENS))
            async for event in stream:
                store.fail_stores, store.fail_loads_from = rng.random() < 0.1, rng.choice((None, None, 1))
                tokens += [event.token] if isinstance(event, TokenOut) else []
                if len(tokens) == patience:
                    await stream.aclose()
                    break
            if tokens != expected[: len(tokens)] or len(tokens) < patience:
                return f"a prompt of {len(prompt)} tokens was answered with {tokens} instead of {expected}"
            served += 1
            if served % 50 == 0:
                store.blocks.clear()
                marks.append(resident_bytes())
        return ""

    wrong = [found for found in await asyncio.gather(*(client() for _ in range(STREAMS))) if found]
    preemptions = engine.preemptions
    await engine.close(time.monotonic_ns() + 10 * SECOND)
    growth = max(marks[-3:]) - max(marks[: max(2, len(marks) // 10)])
    print(f"{served} requests, {preemptions} preemptions, memory grew by {growth / MIB:.1f} MiB")
    if wrong:
        return wrong[0]
    if not preemptions:
        return "nobody was preempted: memory was not full"
    return f"memory grew by {growth} bytes" if growth > GROWTH_BYTES else ""


@click.command()
@click.option("--minutes", default=10.0, show_default=True)
@click.option("--layout", default="paged", show_default=True, type=click.Choice(("paged", "vattention")))
def main(minutes: float, layout: Layout) -> None:
    """Run the soak."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if wrong := asyncio.run(soak(tiny_model(Path(folder) / "tiny"), 60 * minutes, layout)):
            sys.exit(f"engine_soak: {wrong}")


if __name__ == "__main__":
    main()
