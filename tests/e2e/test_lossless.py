"""Losslessness with the real model: what went through a pool in another process is the same to the last bit."""

import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import tokenizers
import torch

from kvpool.cli.conversation import DOCUMENT
from kvpool.client import AsyncPoolClient
from kvpool.config.models import resolve_model
from kvpool.engine.cache import SequenceCache
from kvpool.engine.model import Model, load_model
from kvpool.engine.prefill import chunk_plan
from kvpool.testing.node_process import NodeProcess
from kvpool.units import SECOND

PREFIX, TOTAL, STEPS = 576, 640, 6


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model(resolve_model("smollm2", deadline_ns=soon(300)), dtype="float32", block_tokens=16)
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    directory = resolve_model("smollm2", deadline_ns=soon(300))
    encoded = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).encode(DOCUMENT.read_text())
    return list(encoded.ids[:TOTAL])


@pytest.fixture(scope="module")
def fresh(model: Model, tokens: list[int]) -> tuple[SequenceCache, list[torch.Tensor]]:
    """The prefix computed in chunks, and the logits that follow."""
    cache = model.new_cache(capacity=TOTAL + STEPS, limit=TOTAL + STEPS)
    for start, end in chunk_plan(0, PREFIX, 256):
        model.extend(cache, tokens[start:end])
    return cache, continue_from(model, cache, tokens)


@pytest.mark.parametrize("transport", ["shm", "ucx", "grpc"])
async def test_logits_after_a_pool_loaded_prefix_are_bit_equal(
    model: Model, tokens: list[int], fresh: tuple[SequenceCache, list[torch.Tensor]], transport: str
) -> None:
    """fp32 on CPU: `torch.equal`, by shared memory, by UCX over TCP and by gRPC, for the KV and for every logit after it."""
    written, expected = fresh
    counts = [16] * (PREFIX // 16)
    node = NodeProcess("--capacity", "128MiB", "--offer", transport)
    try:
        async with await AsyncPoolClient.open(node.address, model.namespace, transport=transport) as pool:
            chain = pool.keys(tokens[:PREFIX])

            def fill(index: int, into: npt.NDArray[np.uint8]) -> None:
                written.copy_block(index, 16, into)

            assert await pool.store(chain, 0, counts, fill, deadline_ns=soon(20)) == len(chain)
        loaded = model.new_cache(capacity=TOTAL + STEPS, limit=TOTAL + STEPS)
        async with await AsyncPoolClient.open(node.address, model.namespace, transport=transport) as pool:

            def sink(index: int, payload: npt.NDArray[np.uint8]) -> None:
                loaded.write_block(index, 16, payload)

            assert await pool.load(chain, 0, counts, sink, deadline_ns=soon(20)) == len(chain)
            assert pool.reaches() == {node.node_id: transport}
    finally:
        assert node.stop() == 0
    loaded.advance(PREFIX)
    assert torch.equal(loaded.data, written.data[:, :, :, :PREFIX])
    for got, want in zip(continue_from(model, loaded, tokens), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("victim", range(3))
async def test_logits_are_bit_equal_when_one_of_three_nodes_has_died(
    model: Model, tokens: list[int], fresh: tuple[SequenceCache, list[torch.Tensor]], victim: int
) -> None:
    """Two copies on three nodes: whichever node is lost, the copies that are left are the same bits."""
    written, expected = fresh
    counts = [16] * (PREFIX // 16)
    loaded = model.new_cache(capacity=TOTAL + STEPS, limit=TOTAL + STEPS)
    nodes = [NodeProcess("--capacity", "64MiB", "--id", f"{i:032x}") for i in range(3)]

    def fill(index: int, into: npt.NDArray[np.uint8]) -> None:
        written.copy_block(index, 16, into)

    def sink(index: int, payload: npt.NDArray[np.uint8]) -> None:
        loaded.write_block(index, 16, payload)

    try:
        source = ",".join(node.address for node in nodes)
        async with await AsyncPoolClient.open(source, model.namespace, transport="ucx", copies=2) as pool:
            chain = pool.keys(tokens[:PREFIX])
            assert await pool.store(chain, 0, counts, fill, deadline_ns=soon(20)) == len(chain)
            nodes[victim].kill()
            assert await pool.load(chain, 0, counts, sink, deadline_ns=soon(20)) == len(chain)
    finally:
        for node in nodes:
            node.stop()
    loaded.advance(PREFIX)
    assert torch.equal(loaded.data, written.data[:, :, :, :PREFIX])
    for got, want in zip(continue_from(model, loaded, tokens), expected, strict=True):
        assert torch.equal(got, want)


def continue_from(model: Model, cache: SequenceCache, tokens: list[int]) -> list[torch.Tensor]:
    """Logits after the whole prompt and after each of the next greedy tokens."""
    scores = [model.predict(cache, tokens[PREFIX:TOTAL])]
    for _ in range(STEPS):
        scores.append(model.predict(cache, [int(scores[-1].argmax())]))
    return scores


def soon(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * SECOND)
