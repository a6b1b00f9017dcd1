"""Zero-copy views: right, read-only, in place for as long as they are open, and no longer held than their process lives."""

import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool.block import LayerSpec, Namespace
from kvpool.client import Client, View, here
from kvpool.errors import ClosedError, ConfigError
from kvpool.testing.node_process import NodeProcess, poll

BLOCKS = 8
TOKENS = list(range(16 * BLOCKS))
SHAPE = (BLOCKS, 2, 2, 2, 16, 16)


def blocks(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(SHAPE, dtype=np.float32)


@pytest.fixture
def pool(node: NodeProcess, namespace: Namespace) -> Iterator[Client]:
    with kvpool.connect(node.address, namespace=namespace) as made:
        yield made


def churn(pool: Client, rounds: int) -> None:
    """Put so much that whatever isn't held is evicted."""
    rows = np.zeros((256, 512 * 16), np.uint8)
    for round_ in range(rounds):
        rows[:] = round_ % 251
        assert pool.put([10_000 + round_, *range(16 * 256 - 1)], rows) == 16 * 256


def test_view_shows_the_blocks_in_the_arena(start_node: Callable[..., NodeProcess], namespace: Namespace) -> None:
    """The shape and type of the geometry, one array where they lie side by side, and never writable."""
    with kvpool.connect(start_node().address, namespace=namespace) as pool:
        assert pool.put(TOKENS, blocks()) == 16 * BLOCKS
        view = pool.view([*TOKENS, *range(32)])
        assert view.tokens == 16 * BLOCKS
        assert isinstance(view.blocks, np.ndarray)
        assert (view.blocks.dtype, view.blocks.shape) == (np.dtype(np.float32), SHAPE)
        assert np.array_equal(view.blocks, blocks())
        assert view.valid()
        with pytest.raises(ValueError, match="read-only"):
            view.blocks[0, 0] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.blocks.flags.writeable = True
        view.close()
        assert not view.valid()
        view.close()


def test_view_of_scattered_blocks_is_a_list(pool: Client) -> None:
    """Blocks that were put in another order don't lie at equal distances."""
    chain, rows = pool.keys(TOKENS), blocks()
    for i in (3, 0, 5, 1, 2, 4, 7, 6):
        assert _put_alone(pool, chain, rows, i)
    with pool.view_blocks(chain) as view:
        assert isinstance(view.blocks, list)
        assert len(view.blocks) == BLOCKS
        for i, array in enumerate(view.blocks):
            assert np.array_equal(array, rows[i])
            assert not array.flags.writeable


def _put_alone(pool: Client, chain: Any, rows: np.ndarray, i: int) -> bool:
    def fill(index: int, payload: Any) -> None:
        payload[:] = rows[index].reshape(-1).view(np.uint8)

    deadline_ns = time.monotonic_ns() + 10**10
    return bool(pool._run(pool._client.pool.store(chain, i, [16], fill, deadline_ns=deadline_ns)) == 1)


def test_view_of_layers_that_differ_is_rows_of_bytes(node: NodeProcess, namespace: Namespace) -> None:
    """As with `get`."""
    geometry = replace(namespace.geometry, layers=(LayerSpec("mla", 1, 24, 0), LayerSpec("mla", 1, 24, 0)))
    with kvpool.connect(node.address, namespace=replace(namespace, geometry=geometry)) as pool:
        rows = np.random.default_rng(1).integers(0, 255, (BLOCKS, geometry.payload_bytes(16)), dtype=np.uint8)
        assert pool.put(TOKENS, rows) == 16 * BLOCKS
        with pool.view(TOKENS) as view:
            assert np.array_equal(np.stack(list(view.blocks)), rows)


def test_torch_looks_at_a_view_without_a_copy(pool: Client) -> None:
    """The engine's way in. torch warns once a process that it can't be told that the memory is read-only."""
    torch = pytest.importorskip("torch")
    assert pool.put(TOKENS, blocks()) == 16 * BLOCKS
    with pool.view(TOKENS) as view, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        for array, block in zip(view.blocks, blocks(), strict=True):
            tensor = torch.from_numpy(array)
            assert tensor.data_ptr() == array.ctypes.data
            assert torch.equal(tensor, torch.from_numpy(block))


def test_nothing_there_is_an_empty_view(pool: Client) -> None:
    """A miss is a value."""
    with pool.view(TOKENS) as view:
        assert (view.tokens, len(view.blocks), view.valid()) == (0, 0, True)


def test_open_view_outlives_any_eviction_and_a_closed_one_does_not(start_node: Callable[..., NodeProcess], namespace: Namespace) -> None:
    """The node evicts around what is looked at, and takes it back afterwards."""
    node = start_node()
    with kvpool.connect(node.address, namespace=namespace) as pool:
        assert pool.put(TOKENS, blocks()) == 16 * BLOCKS
        view = pool.view(TOKENS)
        churn(pool, 20)
        assert view.valid()
        assert np.array_equal(np.stack(list(view.blocks)), blocks())
        view.close()
        churn(pool, 20)
        assert pool.lookup(TOKENS) == 0
        assert np.stack(list(view.blocks)).shape == SHAPE  # another block's by now, but no crash


def test_view_outlives_its_client_until_it_is_closed(start_node: Callable[..., NodeProcess], namespace: Namespace) -> None:
    """Whoever closes the pool early loses no byte that somebody looks at."""
    node = start_node()
    pool = kvpool.connect(node.address, namespace=namespace)
    assert pool.put(TOKENS, blocks()) == 16 * BLOCKS
    view = pool.view(TOKENS)
    pool.close()
    with pytest.raises(ClosedError):
        pool.view(TOKENS)
    with kvpool.connect(node.address, namespace=namespace) as other:
        churn(other, 20)
        assert np.array_equal(np.stack(list(view.blocks)), blocks())
        view.close()
        churn(other, 20)
        assert other.lookup(TOKENS) == 0


def test_forgotten_view_is_given_back(start_node: Callable[..., NodeProcess], namespace: Namespace) -> None:
    """A view that is dropped without `close` holds nothing for ever."""
    node = start_node()
    with kvpool.connect(node.address, namespace=namespace) as pool:
        assert pool.put(TOKENS, blocks()) == 16 * BLOCKS
        pool.view(TOKENS)
        churn(pool, 20)
        assert pool.lookup(TOKENS) == 0


def test_view_of_a_dead_node_says_so_and_stays_readable(start_node: Callable[..., NodeProcess], namespace: Namespace) -> None:
    """Frozen bytes are right ones, and `valid` tells that nobody keeps them any more."""
    node = start_node()
    with kvpool.connect(node.address, namespace=namespace) as pool:
        assert pool.put(TOKENS, blocks()) == 16 * BLOCKS
        with pool.view(TOKENS) as view:
            node.kill()
            assert not view.valid()
            assert np.array_equal(np.stack(list(view.blocks)), blocks())
            assert pool.view(TOKENS).tokens == 0


READER = """
import sys
import kvpool
from kvpool.block import Geometry, LayerSpec, Namespace
geometry = Geometry(tuple(LayerSpec("full", 2, 16, 16) for _ in range(2)), 16, "float32")
namespace = Namespace(model=sys.argv[2], revision="1", weights_digest=bytes(32), geometry=geometry, rope="none")
pool = kvpool.connect(sys.argv[1], namespace=namespace)
view = pool.view(range(16 * 8))
print(view.tokens, flush=True)
sys.stdin.read()
"""


def test_death_of_the_reader_gives_its_blocks_back(start_node: Callable[..., NodeProcess], namespace: Namespace) -> None:
    """`kill -9` of a process with an open view: the kernel closes its session, and the node its holds."""
    node = start_node()
    with kvpool.connect(node.address, namespace=namespace) as pool:
        assert pool.put(TOKENS, blocks()) == 16 * BLOCKS
        command = [sys.executable, "-c", READER, node.address, namespace.model]
        reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert reader.stdout is not None
            assert reader.stdout.readline() == f"{16 * BLOCKS}\n"
            churn(pool, 10)
            assert pool.lookup(TOKENS) == 16 * BLOCKS
        finally:
            reader.kill()
            reader.communicate(timeout=30)

        def gone() -> bool:
            churn(pool, 10)
            return pool.lookup(TOKENS) == 0

        poll(gone, "the dead reader's blocks are still held")


def test_views_take_a_way_to_this_host(node: NodeProcess, namespace: Namespace) -> None:
    """An unsupported thing is an error, not an endless miss."""
    with kvpool.connect(node.address, namespace=namespace, transport="grpc") as pool, pytest.raises(ConfigError, match="auto or shm"):
        pool.view(TOKENS)


def test_many_views_at_once_are_bounded(pool: Client) -> None:
    """A process holds 1,024 blocks at most; what is beyond is an empty view, not an error, and comes back after a close."""
    assert pool.put(TOKENS, blocks()) == 16 * BLOCKS
    views: list[View] = [pool.view(TOKENS) for _ in range(1024 // BLOCKS)]
    assert all(view.tokens == 16 * BLOCKS for view in views)
    assert pool.view(TOKENS).tokens == 0
    views.pop().close()
    assert pool.view(TOKENS).tokens == 16 * BLOCKS
    for view in views:
        view.close()


def test_view_of_more_than_a_process_may_hold_is_shorter(node: NodeProcess, pool: Client) -> None:
    """What there is room for is shown."""
    count = 1100
    rows = np.zeros((count, 512 * 16), np.uint8)
    tokens = [77, *range(16 * count - 1)]
    assert pool.put(tokens, rows) == 16 * count
    with pool.view(tokens) as view:
        assert view.tokens == 16 * 1024
        with pool.view(tokens) as none:
            assert none.tokens == 0


def test_no_views_where_a_hold_is_no_promise(pool: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such machines copy, or take a lease."""
    assert pool.put(TOKENS, blocks()) == 16 * BLOCKS
    monkeypatch.setattr(here, "ORDERED", False)
    assert pool.view(TOKENS).tokens == 0
    seen: list[int] = []

    def sink(index: int, payload: Any) -> None:
        assert payload.flags.writeable  # a copy of one's own
        seen.append(index)

    loading = pool._client.pool.load(pool.keys(TOKENS), 0, [16] * BLOCKS, sink, deadline_ns=time.monotonic_ns() + 10**10)
    assert pool._run(loading) == BLOCKS
    assert seen == list(range(BLOCKS))


def test_view_that_is_collected_amid_a_call_deadlocks_nobody(pool: Client) -> None:
    """Whatever lock the thread holds just then."""
    assert pool.put(TOKENS, blocks()) == 16 * BLOCKS
    (reach,) = pool._client.pool._core.links.locals
    view, other = pool.view(TOKENS), pool.view(TOKENS)
    done: list[bool] = []

    def work() -> None:
        with reach._lock:
            view.close()
        assert other._held is not None
        with other._held._lock:
            other.close()
        done.append(True)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    assert done == [True]
