"""KV in a device's memory: the bytes a `KvStore` has, and the order of streams, on a twin that is late, and on a GPU."""

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvpool.block import Geometry
from kvpool.engine.device.lane import Lane
from kvpool.engine.device.place import make_store
from kvpool.engine.device.store import DeviceKvStore
from kvpool.engine.device.streams import CudaDevice, Device, open_device, wait_for
from kvpool.engine.paged.blocks import Copy
from kvpool.engine.paged.store import KvStore, pieces
from kvpool.errors import ConfigError, LocalError
from kvpool.testing.stream_twin import TwinDevice

GEOMETRY = Geometry.uniform(layers=3, kv_heads=2, head_dim=16, block_tokens=8, dtype="float16")
BLOCKS = 10
SCATTERED = [5, 6, 1, 9, 2]


@pytest.fixture(params=["twin", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    if request.param == "twin":
        return TwinDevice()
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return CudaDevice("cuda")


def payload(tokens: int, seed: int, layers: int = 3) -> Any:
    """Random KV of a block."""
    size = GEOMETRY.payload_bytes(tokens) // 3 * layers // 2
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).half().numpy().view(np.uint8)


def copied(store: KvStore, block: int, tokens: int) -> Any:
    into = np.empty(GEOMETRY.payload_bytes(tokens), np.uint8)
    store.copy_block(block, tokens, into)
    return into


def test_payloads_come_and_go_as_in_the_cpus_store(device: Device) -> None:
    """Whole and partial blocks, all layers and some, read in one piece and gathered: the bytes of a `KvStore` beside it."""
    ours, plain = DeviceKvStore(GEOMETRY, BLOCKS, device), KvStore(GEOMETRY, BLOCKS)
    for seed, block in enumerate(SCATTERED):
        tokens = 8 if block != 2 else 5
        for store in (ours, plain):
            store.write_block(block, tokens, payload(tokens, seed))
    for store in (ours, plain):
        store.write_block(9, 8, payload(8, 7, layers=1), first=1)
        store.copy([Copy(9, 0, 3), Copy(5, 7, 8)])
    for block, tokens in ((5, 8), (2, 5), (9, 8), (0, 3), (7, 8), (6, 2)):
        assert (copied(ours, block, tokens) == copied(plain, block, tokens)).all()
    for blocks, tokens in ((SCATTERED, 37), ([5, 6], 16)):
        for layer in range(3):
            for one, other in zip(*(s.read(layer, 1, blocks, pieces(blocks), tokens) for s in (ours, plain)), strict=True):
                assert torch.equal(one.cpu(), other)
    assert ours.gathered_bytes == plain.gathered_bytes > 0
    for store in (ours, plain):
        store.close()


def test_wrong_blocks_and_memory_are_refused(device: Device) -> None:
    """As by a `KvStore`."""
    store = DeviceKvStore(GEOMETRY, BLOCKS, device)
    with pytest.raises(ConfigError, match="no block 10"):
        store.write_block(10, 8, payload(8, 0))
    with pytest.raises(ConfigError, match="contiguous"):
        store.copy_block(0, 8, np.empty((GEOMETRY.payload_bytes(8), 2), np.uint8)[:, 0])
    store.close()


def test_a_pass_sees_what_was_loaded_before_and_the_pool_what_was_computed(device: Device) -> None:
    """Blocks loaded, computed behind, pushed, given to another and loaded again, from two threads: never a byte of another time."""
    store, plain = DeviceKvStore(GEOMETRY, BLOCKS, device), KvStore(GEOMETRY, BLOCKS)
    for turn in range(30):
        block = random.Random(turn).randrange(BLOCKS)
        loading = threading.Thread(target=store.write_block, args=(block, 4, payload(4, turn)))
        loading.start()
        loading.join()
        plain.write_block(block, 4, payload(4, turn))
        slots = torch.arange(8 * block + 4, 8 * block + 8)
        for layer in range(3):
            keys, _ = store.read(layer, None, [block], pieces([block]), 4)
            new = keys[0] * 2 + turn  # "computed" from what was loaded
            store.write(layer, slots.to(device.place), new, -new)
            old, _ = plain.read(layer, None, [block], pieces([block]), 4)
            plain.write(layer, slots, old[0] * 2 + turn, -(old[0] * 2 + turn))
        store.passed()
        assert (copied(store, block, 8) == copied(plain, block, 8)).all()
    store.close()


class Late:
    """A store over a twin whose main stream is late too, and a block that is used and used again."""

    def __init__(self, seed: int) -> None:
        self.device = TwinDevice(seed, lazy=True)
        self.store = DeviceKvStore(GEOMETRY, BLOCKS, self.device)
        self.seen: list[torch.Tensor] = []

    def read(self) -> None:
        """A pass that reads block 3 when its turn comes."""
        keys, _ = self.store.read(0, None, [3], pieces([3]), 8)
        self.device.main.issue(lambda: self.seen.append(keys.clone()))
        self.store.passed()

    def fill(self, value: float) -> None:
        """A pass that writes block 3 when its turn comes."""
        keys, values = (self.store.read(layer, None, [3], pieces([3]), 8) for layer in (0, 1))
        self.device.main.issue(lambda: [array.fill_(value) for array in (*keys, *values)])
        self.store.passed()


def store_after_compute(seed: int, deaf: bool) -> bool:
    """Whether the pool gets what the last pass wrote."""
    late = Late(seed)
    late.store._stores.stream.deaf = deaf  # type: ignore[attr-defined]
    late.fill(1.0)
    late.fill(2.0)
    return bool((copied(late.store, 3, 8).view(np.float16)[: 2 * 8 * 16] == 2.0).all())


def load_after_last_read(seed: int, deaf: bool) -> bool:
    """Whether who had the block before read its own."""
    late = Late(seed)
    late.store._loads.stream.deaf = deaf  # type: ignore[attr-defined]
    late.fill(1.0)
    late.read()
    late.store.write_block(3, 8, payload(8, seed))
    late.read()
    late.store.close()
    return bool((late.seen[0] == 1.0).all()) and bool((late.seen[1] != 1.0).any())


def compute_after_load(seed: int, deaf: bool) -> bool:
    """Whether a pass reads what was loaded, and writes behind it."""
    late = Late(seed)
    late.device.main.deaf = deaf
    late.store.keys.zero_()
    late.store.write_block(3, 8, payload(8, seed))
    late.read()
    late.store.write_block(3, 8, payload(8, seed + 1))
    late.fill(1.0)
    late.read()
    late.store.close()
    return bool((late.seen[0] != 0).any()) and bool((late.seen[1] == 1.0).all())


@pytest.mark.parametrize("order", [store_after_compute, load_after_last_read, compute_after_load])
def test_every_order_that_events_allow_is_right_and_without_them_some_are_not(order: Callable[[int, bool], bool]) -> None:
    """Fifty orders each. A stream that doesn't wait is found out."""
    assert all(order(seed, False) for seed in range(50))
    assert not all(order(seed, True) for seed in range(50))


def test_a_load_does_not_wait_for_the_pass_that_is_being_issued() -> None:
    """Or the next layer could not come while this one is computed: some orders have the load first, some the pass."""
    order: list[str] = []
    for seed in range(50):
        late = Late(seed)
        late.device.main.issue(lambda: order.append("pass"))
        late.store.write_block(4, 8, payload(8, 0))
        late.store._loads.stream.issue(lambda: order.append("load"))
        for event in (late.device.main.record(), late.store._loads.stream.record()):
            wait_for(event)
    assert {tuple(order[at : at + 2]) for at in range(0, 100, 2)} == {("pass", "load"), ("load", "pass")}


def test_a_device_that_is_stuck_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait without an end."""

    class Never:
        def done(self) -> bool:
            return False

    with pytest.raises(LocalError, match="did not finish"):
        wait_for(Never(), 0.01)
    lane = Lane(TwinDevice(), 16, slots=1)
    with lane.slot(), pytest.raises(LocalError, match="stuck"), lane.slot(0.01):
        pass
    with lane.slot() as slot:
        slot.done = Never()
    with pytest.raises(LocalError, match="did not finish"), lane.slot(0.01):
        pass


def test_what_the_device_does_not_have_is_refused() -> None:
    """Another layout, a device that isn't there."""
    with pytest.raises(ConfigError, match="leave --layout out"):
        make_store(replace(GEOMETRY, block_tokens=64), 4, TwinCuda(), "vattention")
    with pytest.raises(ConfigError, match="no cuda:99 here"):
        open_device("cuda:99")
    assert open_device("cpu") is None


class TwinCuda(TwinDevice):
    """A twin that goes by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.place = torch.device("cuda:0")
