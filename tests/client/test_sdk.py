"""The SDK as a user meets it: synchronous and asynchronous, numpy and torch."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import kvpool
from kvpool.block import LayerSpec, Namespace
from kvpool.client.arrays import blocks_shape
from kvpool.errors import ClosedError, ConfigError, UnavailableError
from kvpool.testing.node_process import NodeProcess

TOKENS = list(range(16 * 3 + 7))
SHAPE = (3, 2, 2, 2, 16, 16)


def blocks(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(SHAPE, dtype=np.float32)


def test_put_then_get_returns_equal_blocks(node: NodeProcess, namespace: Namespace) -> None:
    """The ten lines of the README."""
    with kvpool.connect(node.address, namespace=namespace) as pool:
        assert pool.lookup(TOKENS) == 0
        assert pool.get(TOKENS).tokens == 0
        assert pool.put(TOKENS, blocks()) == 48
        assert pool.lookup(TOKENS) == 48
        got = pool.get(TOKENS)
        assert got.tokens == 48
        assert np.array_equal(got.blocks, blocks())
        longer = pool.get([*TOKENS[:40], 9999, *range(50)])
        assert longer.tokens == 32
        assert np.array_equal(longer.blocks, blocks()[:2])


def test_get_fills_the_callers_array(node: NodeProcess, namespace: Namespace) -> None:
    """Large readers bring their own memory; a short one gets the blocks that fit."""
    with kvpool.connect(node.address, namespace=namespace) as pool:
        pool.put(TOKENS, blocks())
        out = np.zeros((2, *SHAPE[1:]), np.float32)
        got = pool.get(TOKENS, out)
        assert got.tokens == 32
        assert np.array_equal(out, blocks()[:2])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch_tensors_go_in_and_out_bit_for_bit(node: NodeProcess, namespace: Namespace, dtype: str) -> None:
    """torch users need no detour over numpy, not even for bfloat16, which numpy lacks."""
    torch = pytest.importorskip("torch")
    space = replace(namespace, geometry=replace(namespace.geometry, dtype=dtype))
    tensor = torch.from_numpy(blocks()).to(getattr(torch, dtype))
    with kvpool.connect(node.address, namespace=space) as pool:
        assert pool.put(TOKENS, tensor) == 48
        out = torch.zeros_like(tensor)
        assert pool.get(TOKENS, out).tokens == 48
        assert torch.equal(out, tensor)


async def test_async_client_does_the_same(node: NodeProcess, namespace: Namespace) -> None:
    """The same calls on an event loop."""
    async with await kvpool.connect_async(node.address, namespace=namespace) as pool:
        assert await pool.put(TOKENS, blocks()) == 48
        assert await pool.lookup(TOKENS) == 48
        assert np.array_equal((await pool.get(TOKENS)).blocks, blocks())


def test_mla_blocks_are_rows_of_bytes(node: NodeProcess, namespace: Namespace) -> None:
    """Layers that aren't uniform have no single tensor shape; their blocks are payload rows."""
    geometry = replace(namespace.geometry, layers=(LayerSpec("mla", 1, 24, 0), LayerSpec("mla", 1, 24, 0)))
    rows = np.random.default_rng(1).integers(0, 255, blocks_shape(geometry, 3), dtype=np.uint8)
    with kvpool.connect(node.address, namespace=replace(namespace, geometry=geometry)) as pool:
        assert pool.put(TOKENS, rows) == 48
        assert np.array_equal(pool.get(TOKENS).blocks, rows)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (np.zeros((2, *SHAPE[1:]), np.float32), "make 3 blocks of 16, but 2 were given"),
        (np.zeros(SHAPE, np.float64), "float32"),
        (np.zeros((3, 5), np.float32), "must have shape"),
        (np.zeros((2, 3, *SHAPE[1:]), np.float32)[:, :, :, :, :, :8], "contiguous"),
        ([1, 2, 3], "numpy array or a torch tensor"),
    ],
)
def test_wrong_blocks_are_refused_with_a_reason(node: NodeProcess, namespace: Namespace, bad: object, says: str) -> None:
    """A wrong shape or dtype must never become bytes in the pool."""
    with kvpool.connect(node.address, namespace=namespace) as pool:
        with pytest.raises(ConfigError, match=says):
            pool.put(TOKENS, bad)
        assert pool.lookup(TOKENS) == 0


def test_named_transport_that_no_node_offers_is_an_error(namespace: Namespace) -> None:
    """Whoever asks for a transport by name hears at once that it can't be had, instead of missing for ever."""
    node = NodeProcess("--capacity", "1MiB", "--offer", "grpc")
    try:
        for transport in ("shm", "ucx"):
            with pytest.raises(UnavailableError, match=f"no node can be reached by {transport}: .*not offered"):
                kvpool.connect(node.address, namespace=namespace, transport=transport)
        kvpool.connect(node.address, namespace=namespace).close()
    finally:
        assert node.stop() == 0


def test_closed_client_refuses(node: NodeProcess, namespace: Namespace) -> None:
    """Use after close is the caller's mistake; closing twice is not."""
    pool = kvpool.connect(node.address, namespace=namespace)
    pool.close()
    pool.close()
    with pytest.raises(ClosedError):
        pool.lookup(TOKENS)


def test_sdk_imports_no_torch() -> None:
    """An SDK user installs no torch; importing it must not be tried."""
    code = "import kvpool, sys; kvpool.connect; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
