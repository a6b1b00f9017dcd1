"""Page-locked mappings, and CUDA by way of torch: its calls on CPU tensors behind a `torch.cuda` that notes them, and on a GPU."""

import gc
import logging
import mmap
import os
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.errors import ConfigError
from kvpool.testing.device_twin import DeviceTwin
from kvpool.transport.cuda import Cuda, cuda_of
from kvpool.transport.device import Pins

torch: Any = pytest.importorskip("torch")

NBYTES = 1 << 16
REFUSED = 712


def mapped() -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, NBYTES), np.uint8)[: NBYTES - 1]


class PretendTorch:
    """torch with a `cuda` that needs no GPU. `calls`: what it was asked; `code`: the CUDA runtime's answer; `late`: queries until done."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.code = 0
        self.late = 0
        self.cuda = SimpleNamespace(
            Stream=lambda device: self.note("Stream", SimpleNamespace(synchronize=lambda: self.note("synchronize", None))),
            stream=lambda stream: self.inside("stream"),
            device=lambda device: self.inside("device"),
            current_stream=lambda device: SimpleNamespace(record_event=lambda: SimpleNamespace(query=self.query)),
            cudart=lambda: SimpleNamespace(
                cudaHostRegister=lambda *args: self.note(("register", *args), self.code),
                cudaHostUnregister=lambda *args: self.note(("unregister", *args), self.code),
            ),
            CudaError=lambda code: RuntimeError(f"part or all of it is already mapped ({code})"),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, count: int, *, dtype: Any, pin_memory: bool = False, device: Any = None) -> Any:
        return torch.empty(count, dtype=dtype)

    def note(self, call: Any, answer: Any) -> Any:
        self.calls.append(call)
        return answer

    @contextmanager
    def inside(self, what: str) -> Any:
        self.calls.append(what)
        yield
        self.calls.append(f"end of {what}")

    def query(self) -> bool:
        self.late -= 1
        return self.late < 0


@pytest.fixture
def pretend() -> PretendTorch:
    return PretendTorch()


@pytest.fixture(params=["pretend", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> tuple[Cuda, str]:
    """A `Cuda`, and where its tensors lie."""
    if request.param == "pretend":
        return Cuda(PretendTorch(), torch.device("cpu")), "cpu"
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return Cuda(torch, torch.device("cuda:0")), "cuda:0"


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_rows_go_in_and_out_bit_for_bit(place: tuple[Cuda, str], dtype: str, inference: bool) -> None:
    """Of any type, also of tensors that were made in inference mode, as engines make theirs."""
    cuda, where = place
    with torch.inference_mode(inference):
        tensor = torch.zeros((4, 2, 3, 8), dtype=getattr(torch, dtype), device=where)
    row_bytes = tensor[0].nbytes
    host = np.random.default_rng(1).integers(0, 255, (4, row_bytes), dtype=np.uint8)
    rows = cuda.rows(tensor, row_bytes)
    assert (len(rows), len(rows[1:3]), rows.data_ptr()) == (4, 2, tensor.data_ptr())
    cuda.to_device(rows[1:], [host[1], host[2], host[3]])
    cuda.wait()
    back = cuda.page_locked(4 * row_bytes).reshape(4, row_bytes)
    for k in range(4):
        cuda.to_host(back[k], rows[k])
    cuda.wait()
    assert np.array_equal(back[1:], host[1:])
    assert not back[0].any()
    assert len(cuda.rows(tensor[:0], row_bytes)) == 0


def test_mapping_is_locked_for_as_long_as_somebody_sees_it(place: tuple[Cuda, str], caplog: pytest.LogCaptureFixture) -> None:
    """The same steps with the CUDA runtime of a GPU: locked, told apart from what isn't, undone without complaint."""
    cuda, where = place
    pins, memory = Pins(), mapped()
    with caplog.at_level(logging.WARNING):
        assert pins.lock(memory, cuda)
        assert pins.lock(memory[100:200], cuda)
        if where != "cpu":
            assert torch.from_numpy(memory).is_pinned()
        del memory
        gc.collect()
    assert caplog.records == []


@pytest.mark.gpu
def test_refusal_of_the_cuda_runtime_is_told_and_leaves_no_error_behind() -> None:
    """The next kernel of anybody would report it otherwise."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    cuda, memory = Cuda(torch, torch.device("cuda:0")), mapped()
    address = memory.ctypes.data
    assert cuda.register(address, NBYTES) == ""
    assert "already" in cuda.register(address, NBYTES)
    assert torch.ones(3, device="cuda:0").sum().item() == 3
    cuda.unregister(address)


def test_copies_run_on_a_stream_of_their_own(pretend: PretendTorch) -> None:
    """One stream for all calls; the caller's own goes on undisturbed."""
    cuda = Cuda(pretend, torch.device("cpu"))
    rows = cuda.rows(torch.zeros((2, 8), dtype=torch.uint8), 8)
    cuda.to_device(rows, [np.ones(8, np.uint8), np.ones(8, np.uint8)])
    cuda.to_host(np.zeros(8, np.uint8), rows[0])
    cuda.wait()
    assert pretend.calls == ["Stream", "stream", "end of stream", "stream", "end of stream", "synchronize"]


def test_what_the_caller_has_queued_is_waited_for_until_the_deadline(pretend: PretendTorch) -> None:
    """A kernel that never ends is the caller's; the call ends all the same."""
    cuda = Cuda(pretend, torch.device("cpu"))
    pretend.late = 3
    assert cuda.settled(time.monotonic_ns() + 10**10)
    pretend.late = 10**9
    assert not cuda.settled(time.monotonic_ns())


def test_mapping_is_registered_as_a_whole_and_for_all_devices(pretend: PretendTorch) -> None:
    """`cudaHostRegisterPortable` is 1; two devices share what one has locked."""
    one, two = Cuda(pretend, torch.device("cpu")), Cuda(pretend, torch.device("cpu"))
    pins, memory = Pins(), mapped()
    address = memory.ctypes.data
    assert pins.lock(memory[5:], one)
    assert pins.lock(memory, two)
    del memory
    gc.collect()
    at = [call for call in pretend.calls if isinstance(call, tuple)]
    assert at == [("register", address, NBYTES, 1), ("unregister", address)]


def test_refused_registration_is_remembered_and_not_undone(pretend: PretendTorch, caplog: pytest.LogCaptureFixture) -> None:
    """What the runtime says goes to the log, once."""
    pretend.code = REFUSED
    pins, memory = Pins(), mapped()
    with caplog.at_level(logging.WARNING):
        assert not pins.lock(memory, Cuda(pretend, torch.device("cpu")))
        assert not pins.lock(memory, Cuda(pretend, torch.device("cpu")))
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["part or all of it is already mapped (712)"]
    del memory
    gc.collect()
    assert [call[0] for call in pretend.calls if isinstance(call, tuple)] == ["register"]


def test_refused_end_of_a_registration_goes_to_the_log(pretend: PretendTorch, caplog: pytest.LogCaptureFixture) -> None:
    """It happens in a finalizer, where nobody hears an exception."""
    pins, memory = Pins(), mapped()
    assert pins.lock(memory, Cuda(pretend, torch.device("cpu")))
    pretend.code = REFUSED
    with caplog.at_level(logging.WARNING):
        del memory
        gc.collect()
    assert ["stays page-locked" in record.getMessage() for record in caplog.records] == [True]


def test_address_of_a_mapping_that_is_gone_is_locked_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses are used again: what was known of one ends with its mapping. A forked child undoes nothing of its parent's."""
    twin, pins = DeviceTwin(), Pins()
    for _ in range(3):
        memory = mapped()
        assert pins.lock(memory, twin)
        del memory
        gc.collect()
    assert twin.steps == ["register", "unregister"] * 3
    memory = mapped()
    pins.lock(memory, twin)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    del memory
    gc.collect()
    assert twin.steps[6:] == ["register"]


def test_no_page_locked_memory_says_so(pretend: PretendTorch) -> None:
    """In words, with what to do."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    pretend.empty = refuse  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="no 8 B of page-locked memory to be had: CUDA error: out of memory; free some memory"):
        Cuda(pretend, torch.device("cpu")).page_locked(8)


def test_device_is_that_of_a_torch_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else's memory is guessed at."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: ("stream of", device.type))
    assert cuda_of(torch.zeros(1))._stream == ("stream of", "cpu")
    with pytest.raises(ConfigError, match="must be a torch tensor, got SimpleNamespace"):
        cuda_of(SimpleNamespace(is_cuda=True))
