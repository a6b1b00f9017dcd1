"""The GPU region: the same bytes whatever the staging, a device that fails, and a node that needs no torch for it."""

import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.errors import ClosedError, ConfigError
from kvpool.policy.eviction import PrefixLru
from kvpool.pool.allocator import Allocator
from kvpool.testing.tier_kit import data_of, read, record_of, soon
from kvpool.tier import gpu
from kvpool.tier.gpu import GpuRegion, open_gpu_tier
from kvpool.units import MIB

torch: Any = pytest.importorskip("torch")
torch.set_num_threads(1)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _need_the_device(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [0, 1, 99, 100, 101, 200, 201, 399, 1000])
def test_transfer_of_any_number_of_staging_buffers_keeps_bytes_and_neighbours(device: str, length: int) -> None:
    """The two buffers of a lane take turns: a length just above or below their size must not mix them up."""
    region = GpuRegion(1200, device, staging_bytes=100)
    region.write(0, np.full(1200, 7, np.uint8))
    region.write(100, data_of(1, length))
    into = np.full(1200, 9, np.uint8)
    region.read(0, into)
    assert np.array_equal(into[100 : 100 + length], data_of(1, length))
    assert bool((into[:100] == 7).all())
    assert bool((into[100 + length :] == 7).all())
    part = np.zeros(length, np.uint8)
    region.read(100, part)
    assert np.array_equal(part, data_of(1, length))


@pytest.mark.parametrize("device", DEVICES)
def test_transfers_at_once_do_not_share_a_lane(device: str) -> None:
    """More threads than lanes, each with bytes of its own."""
    region = GpuRegion(8 * 10_000, device, staging_bytes=512, lanes=2)
    wrong = list[int]()

    def work(number: int) -> None:
        for turn in range(20):
            data, into = data_of(100 * number + turn, 10_000), np.zeros(10_000, np.uint8)
            region.write(number * 10_000, data)
            region.read(number * 10_000, into)
            if not np.array_equal(data, into):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


@pytest.mark.parametrize("device", DEVICES)
def test_tier_is_named_and_sized_as_asked(device: str) -> None:
    """What an operator sees of it."""
    tier = open_gpu_tier(MIB, device, space=Allocator(MIB), policy=PrefixLru(), max_objects=3)
    assert (tier.name, tier.durable, tier.books().capacity_bytes, tier.books().max_objects) == ("gpu", False, MIB, 3)
    assert tier.put([record_of(1, 300_000)], soon()) == [True]
    assert read(tier, [1], 300_000) == [True]
    tier.close()


def test_device_that_fails_is_an_os_error_and_its_lane_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier knows what to do with `OSError`; a lane that is lost for ever would end in a standstill."""
    region = GpuRegion(1000, "cpu", lanes=1)

    def fail(*_: object) -> None:
        raise RuntimeError("device-side assert")

    with monkeypatch.context() as patch:
        patch.setattr(gpu._Lane, "copy", fail)
        for _ in range(3):
            with pytest.raises(OSError, match="device-side assert"):
                region.write(0, data_of(1, 10))
            with pytest.raises(OSError, match="device-side assert"):
                region.read(0, data_of(1, 10))
    region.write(0, data_of(1, 10))


def test_device_that_never_finishes_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wait ends."""
    region = GpuRegion(1000, "cpu", lanes=1)
    region._lanes.get()
    monkeypatch.setattr(gpu, "LANE_WAIT_S", 0.0)
    with pytest.raises(OSError, match="no transfer within"):
        region.write(0, data_of(1, 10))


def test_region_that_cannot_be_had_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong flag is found at start, not at the first block."""
    with pytest.raises(ConfigError, match="at least one byte"):
        GpuRegion(0, "cpu")
    with pytest.raises(ConfigError, match="lower the GPU tier's capacity"):
        GpuRegion(1 << 60, "cpu")
    for device, message in (("tape", "no such device"), ("meta", "can't lie on"), ("cuda:77", "there is no cuda:77")):
        with pytest.raises(ConfigError, match=message):
            GpuRegion(10, device)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match="needs torch"):
        GpuRegion(10, "cpu")


def test_ranges_outside_and_use_after_close_refused() -> None:
    """A wrong offset must not reach a neighbour; a closed region says so."""
    region = GpuRegion(100, "cpu")
    with pytest.raises(ConfigError, match="outside"):
        region.write(91, data_of(1, 10))
    with pytest.raises(ConfigError, match="outside"):
        region.read(-1, data_of(1, 10))
    with pytest.raises(ConfigError, match="outside"):
        region.flush(0, 101)
    region.close()
    region.close()
    with pytest.raises(ClosedError):
        region.write(0, data_of(1, 10))
    with pytest.raises(ClosedError):
        region.read(0, data_of(1, 10))


def test_lane_over_a_device_with_streams_waits_for_each_buffer_before_it_is_used_again() -> None:
    """The steps of the asynchronous way, without a GPU: a copy is only sure to have happened once it was waited for."""
    device = _LateDevice()
    lane = object.__new__(gpu._Lane)
    lane._torch, lane._stream, lane._done = device, object(), [None, None]  # type: ignore[assignment]
    lane.tensors = [torch.zeros(100, dtype=torch.uint8) for _ in range(2)]
    lane.arrays = [tensor.numpy() for tensor in lane.tensors]
    region = GpuRegion(1000, "cpu", lanes=1)
    region._lanes.get()
    region._lanes.put(lane)
    lane.copy = device.copy_of(lane)  # type: ignore[method-assign]
    region.write(17, data_of(1, 777))
    into = np.zeros(777, np.uint8)
    region.read(17, into)
    assert np.array_equal(into, data_of(1, 777))


class _LateDevice:
    """Copies nothing until the last moment: when it is waited for."""

    def copy_of(self, lane: gpu._Lane) -> Any:
        """A `copy` for `lane` that only remembers."""

        def copy(into: Any, source: Any, half: int) -> None:
            assert lane._done[half] is None, "the buffer is still in use"
            lane._done[half] = SimpleNamespace(synchronize=lambda: into.copy_(source))

        return copy


def test_tier_package_imports_without_torch() -> None:
    """A node without a GPU tier runs where torch isn't installed, and starts quickly where it is."""
    code = "import sys, kvpool.tier, kvpool.tier.gpu; print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout.strip() == "False"
