"""CUDA tensors in and out, with a twin of the device that copies as late as it may, and with a real one where there is one."""

import gc
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool.block import LayerSpec, Namespace
from kvpool.client import Client, device
from kvpool.client.device import check_blocks
from kvpool.client.held import Held
from kvpool.errors import ConfigError
from kvpool.testing.device_twin import DeviceTwin, TwinTensor
from kvpool.testing.node_process import NodeProcess

BLOCKS = 10
TOKENS = list(range(16 * BLOCKS))
SHAPE = (BLOCKS, 2, 2, 2, 16, 16)
ROW = 512 * 16


def blocks(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(SHAPE, dtype=np.float32)


class TwinWorld:
    """Tensors of the twin."""

    def __init__(self, twin: DeviceTwin) -> None:
        self.twin = twin

    def tensor(self, array: np.ndarray) -> Any:
        return TwinTensor(array.copy())

    def array(self, tensor: Any) -> np.ndarray:
        shown: np.ndarray = tensor.memory
        return shown


class CudaWorld:
    """Tensors on a GPU."""

    def tensor(self, array: np.ndarray) -> Any:
        return pytest.importorskip("torch").from_numpy(array.copy()).cuda()

    def array(self, tensor: Any) -> np.ndarray:
        shown: np.ndarray = tensor.cpu().numpy()
        return shown


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> DeviceTwin:
    made = DeviceTwin()
    release = Held.release

    def released(held: Held) -> None:
        made.steps.append("release")
        release(held)

    monkeypatch.setattr(Held, "release", released)
    monkeypatch.setattr(device, "cuda_of", lambda _: made)
    return made


@pytest.fixture(params=["twin", pytest.param("cuda", marks=pytest.mark.gpu)])
def world(request: pytest.FixtureRequest) -> TwinWorld | CudaWorld:
    if request.param == "twin":
        return TwinWorld(request.getfixturevalue("twin"))
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("no CUDA device")
    return CudaWorld()


@pytest.fixture
def pool(node: NodeProcess, namespace: Namespace) -> Iterator[Client]:
    with kvpool.connect(node.address, namespace=namespace, transport="shm") as made:
        yield made


def empty() -> TwinTensor:
    return TwinTensor(np.zeros(SHAPE, np.float32))


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_blocks_go_to_a_device_and_come_back_bit_for_bit(
    node: NodeProcess, namespace: Namespace, world: TwinWorld | CudaWorld, transport: str
) -> None:
    """Whatever the way; what was put is what others read, checksums and all."""
    with kvpool.connect(node.address, namespace=namespace, transport=transport) as pool:
        out = world.tensor(np.zeros(SHAPE, np.float32))
        assert pool.get(TOKENS, out).tokens == 0
        assert pool.put(TOKENS, world.tensor(blocks())) == 16 * BLOCKS
        got = pool.get([*TOKENS, *range(40)], out)
        assert got.tokens == 16 * BLOCKS
        assert np.array_equal(world.array(out), blocks())
        assert np.array_equal(world.array(got.blocks), blocks())
        short = world.tensor(np.zeros((3, *SHAPE[1:]), np.float32))
        assert pool.get(TOKENS, short).tokens == 48
        assert np.array_equal(world.array(short), blocks()[:3])
        out = world.tensor(np.zeros(SHAPE, np.float32))
        assert pool.get([*TOKENS[:40], 9999, *TOKENS[41:]], out).tokens == 32
        assert np.array_equal(world.array(out)[:2], blocks()[:2])
    with kvpool.connect(node.address, namespace=namespace, checksums="always") as other:
        assert np.array_equal(other.get(TOKENS).blocks, blocks())


@pytest.mark.parametrize("count", [1, 400])
def test_put_of_any_size_arrives_right(start_node: Callable[..., NodeProcess], namespace: Namespace, world: Any, count: int) -> None:
    """A small one goes to a slab, one that is larger than a quarter of it is reserved and committed."""
    rows = np.random.default_rng(1).integers(0, 255, (count, ROW), dtype=np.uint8)
    with kvpool.connect(start_node().address, namespace=namespace, checksums="always") as pool:
        assert pool.put(range(16 * count), world.tensor(rows)) == 16 * count
        assert np.array_equal(pool.get(range(16 * count)).blocks.reshape(-1).view(np.uint8), rows.reshape(-1))


def test_copies_are_waited_for_before_the_blocks_are_let_go(pool: Client, twin: DeviceTwin, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's stream first, with nothing held; then batch by batch: copy, wait, release."""
    monkeypatch.setattr(device, "BATCH", 4)
    assert pool.put(TOKENS, blocks()) == 16 * BLOCKS
    assert pool.get(TOKENS, empty()).tokens == 16 * BLOCKS
    batch = ["wait", "release"]
    assert twin.steps == ["settled", "register", "to device: 4", *batch, "to device: 4", *batch, "to device: 2", *batch]


def test_each_block_of_a_put_is_waited_for_before_its_checksum(pool: Client, twin: DeviceTwin) -> None:
    """A checksum of bytes that haven't come would make every reader miss."""
    assert pool.put(TOKENS, blocks(1)) == 16 * BLOCKS  # connects
    assert pool.put([7, *TOKENS], TwinTensor(blocks())) == 16 * BLOCKS
    assert twin.steps == ["settled", "register", *["to host", "wait"] * BLOCKS]
    assert np.array_equal(pool.get([7, *TOKENS]).blocks, blocks())


def test_node_gives_nothing_away_while_copies_run(start_node: Callable[..., NodeProcess], namespace: Namespace, twin: DeviceTwin) -> None:
    """Everything that can be evicted is, amid the copies: what arrives is right all the same."""
    node = start_node()
    with kvpool.connect(node.address, namespace=namespace) as pool, kvpool.connect(node.address, namespace=namespace) as other:
        assert pool.put(TOKENS, blocks()) == 16 * BLOCKS
        out = empty()
        twin.amid = lambda: churn(other)
        assert pool.get(TOKENS, out).tokens == 16 * BLOCKS
        assert np.array_equal(out.memory, blocks())
        churn(other)
        assert pool.lookup(TOKENS) == 0


def churn(pool: Client) -> None:
    """Put so much that whatever isn't held is evicted."""
    for round_ in range(20):
        assert pool.put([10_000 + round_, *range(16 * 256 - 1)], np.full((256, ROW), round_, np.uint8)) == 16 * 256


def test_copies_from_a_node_that_died_meanwhile_do_not_count(
    start_node: Callable[..., NodeProcess], namespace: Namespace, twin: DeviceTwin
) -> None:
    """Without a session nobody kept the bytes in place."""
    node = start_node()
    with kvpool.connect(node.address, namespace=namespace, timeout_s=5) as pool:
        assert pool.put(TOKENS, blocks()) == 16 * BLOCKS
        twin.amid = node.kill
        assert pool.get(TOKENS, empty()).tokens == 0
        assert twin.steps[2:5] == ["to device: 10", "wait", "release"]
        assert not any("to device" in step for step in twin.steps[5:])


def test_arena_is_locked_once_and_until_its_mapping_goes(node: NodeProcess, namespace: Namespace, twin: DeviceTwin) -> None:
    """Locking is slow, and what stays locked after its mapping is memory lost."""
    pool = kvpool.connect(node.address, namespace=namespace, transport="shm")
    assert pool.put(TOKENS, TwinTensor(blocks())) == 16 * BLOCKS
    assert pool.get(TOKENS, empty()).tokens == 16 * BLOCKS
    assert pool.get(TOKENS, empty()).tokens == 16 * BLOCKS
    assert twin.steps.count("register") == 1
    assert list(twin.locked.values()) == [64 << 20]
    pool.close()
    gc.collect()
    assert twin.steps[-1] == "unregister"
    assert twin.locked == {}


def test_arena_that_cannot_be_locked_is_copied_from_all_the_same(
    node: NodeProcess, namespace: Namespace, twin: DeviceTwin, caplog: pytest.LogCaptureFixture
) -> None:
    """Slower is better than not at all; one line in the log, and it isn't tried again, nor undone."""
    twin.refusal = "out of memory (2)"
    with caplog.at_level(logging.WARNING), kvpool.connect(node.address, namespace=namespace, transport="shm") as pool:
        out = empty()
        assert pool.put(TOKENS, TwinTensor(blocks())) == 16 * BLOCKS
        assert pool.get(TOKENS, out).tokens == pool.get(TOKENS, out).tokens == 16 * BLOCKS
        assert np.array_equal(out.memory, blocks())
    gc.collect()
    assert [record.getMessage() for record in caplog.records if "page-locked" in record.getMessage()] == [
        "64.00 MiB of a node's memory can't be page-locked, so copies to and from the device are slower: out of memory (2)"
    ]
    assert twin.steps.count("register") == 1
    assert "unregister" not in twin.steps


def test_bytes_from_a_wire_go_through_one_buffer(
    node: NodeProcess, namespace: Namespace, twin: DeviceTwin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allocated once, used a window at a time, each copied before the next one overwrites it."""
    monkeypatch.setattr(device, "STAGE_BYTES", 4 * ROW + 1)
    with kvpool.connect(node.address, namespace=namespace, transport="grpc") as pool:
        assert pool.put(TOKENS, blocks()) == 16 * BLOCKS
        for _ in range(2):
            out = empty()
            assert pool.get(TOKENS, out).tokens == 16 * BLOCKS
            assert np.array_equal(out.memory, blocks())
    windows = ["to device: 4", "wait", "to device: 4", "wait", "to device: 2", "wait"]
    assert twin.steps == ["settled", f"buffer of {4 * ROW}", *windows, "settled", *windows]


def test_device_that_fails_tells_the_caller_and_lets_go(pool: Client, twin: DeviceTwin) -> None:
    """A CUDA error is the process's own trouble, no miss; but the node gets its blocks back."""

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert pool.put(TOKENS, blocks()) == 16 * BLOCKS
    twin.amid = fail
    with pytest.raises(RuntimeError, match="illegal memory access"):
        pool.get(TOKENS, empty())
    assert twin.steps[-1] == "release"
    twin.amid = fail
    with pytest.raises(RuntimeError, match="illegal memory access"):
        pool.put([7, *TOKENS], TwinTensor(blocks()))
    assert pool.lookup([7, *TOKENS]) == 0


def test_buffer_of_a_failed_transfer_is_not_used_again(node: NodeProcess, namespace: Namespace, twin: DeviceTwin) -> None:
    """A transfer that was given up may still write to it."""
    with kvpool.connect(node.address, namespace=namespace, transport="grpc") as pool:
        assert pool.put(TOKENS, blocks()) == 16 * BLOCKS
        twin.amid = lambda: (_ for _ in ()).throw(RuntimeError("CUDA error"))
        with pytest.raises(RuntimeError, match="CUDA error"):
            pool.get(TOKENS, empty())
        assert pool.get(TOKENS, empty()).tokens == 16 * BLOCKS
        assert pool.get(TOKENS, empty()).tokens == 16 * BLOCKS
    assert sum(step.startswith("buffer") for step in twin.steps) == 2


def test_device_that_is_busy_beyond_the_deadline_is_a_miss(pool: Client, twin: DeviceTwin) -> None:
    """Nothing is held or granted for a stream that doesn't get to it."""
    assert pool.put(TOKENS, blocks()) == 16 * BLOCKS
    twin.busy = True
    assert pool.get(TOKENS, empty()).tokens == 0
    assert pool.put([7, *TOKENS], TwinTensor(blocks())) == 0
    assert twin.steps == ["settled", "settled"]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (TwinTensor(blocks()[:2]), "make 10 blocks of 16, but 2 were given"),
        (TwinTensor(np.zeros(SHAPE, np.float16)), "blocks of this pool are float32, got float16"),
        (TwinTensor(np.zeros((BLOCKS, 2, 2, 16, 2, 16), np.float32)), r"float32 \[n, 2, 2, 2, 16, 16\] or uint8 \[n, 8192\], got float32"),
        (TwinTensor(np.zeros((BLOCKS, 5), np.uint8)), r"uint8 \[n, 8192\], got uint8 \[10, 5\]"),
        (TwinTensor(np.zeros((*SHAPE, 2), np.float32)[..., 0]), r"pass x.contiguous\(\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_a_reason(pool: Client, twin: DeviceTwin, bad: TwinTensor, says: str) -> None:
    """Before anything is asked of the device."""
    with pytest.raises(ConfigError, match=says):
        pool.put(TOKENS, bad)
    assert twin.steps == []


def test_layers_that_differ_are_rows_of_bytes(namespace: Namespace) -> None:
    """As everywhere: no other shape fits them."""
    geometry = replace(namespace.geometry, layers=(LayerSpec("mla", 1, 24, 0), LayerSpec("mla", 1, 24, 0)))
    row = geometry.payload_bytes(16)
    check_blocks(TwinTensor(np.zeros((3, row), np.uint8)), geometry)
    for bad in (np.zeros((3, row // 4), np.float32), np.zeros(row, np.uint8)):
        with pytest.raises(ConfigError, match=rf"blocks must be uint8 \[n, {row}\]"):
            check_blocks(TwinTensor(bad), geometry)


def test_other_devices_and_what_is_not_torch_are_refused_with_a_reason(pool: Client) -> None:
    """Those have no copy engine that is known here."""
    torch = pytest.importorskip("torch")
    with pytest.raises(ConfigError, match=r"blocks are on meta; copy them to the host first with x.cpu\(\)"):
        pool.get(TOKENS, torch.empty(SHAPE, device="meta"))
    with pytest.raises(ConfigError, match=r"must be a torch tensor, got TwinTensor; torch.from_dlpack\(x\) makes one"):
        pool.get(TOKENS, empty())


def test_nothing_of_it_is_loaded_without_a_cuda_tensor(node: NodeProcess) -> None:
    """Who has no GPU pays nothing, and torch is nobody's import here."""
    code = """
import sys, kvpool
from kvpool.block import Geometry, LayerSpec, Namespace
geometry = Geometry((LayerSpec("full", 2, 16, 16),), 16, "float32")
space = Namespace(model="no-gpu", revision="1", weights_digest=bytes(32), geometry=geometry, rope="none")
with kvpool.connect(sys.argv[1], namespace=space) as pool:
    pool.get(range(32))
assert not [name for name in sys.modules if name in ("kvpool.client.device", "kvpool.transport.cuda", "kvpool.transport.device")]
import kvpool.client.device
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, node.address], check=True, timeout=60)


@pytest.mark.gpu
async def test_async_client_says_who_takes_cuda_tensors(node: NodeProcess, namespace: Namespace) -> None:
    """It would block its event loop."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    async with await kvpool.connect_async(node.address, namespace=namespace) as pool:
        with pytest.raises(ConfigError, match="use Client, which takes CUDA tensors"):
            await pool.get(TOKENS, torch.empty(SHAPE, device="cuda"))
