"""The compute thread: one job at a time, cancellation within a job, and an end."""

import asyncio
import threading
from collections.abc import AsyncIterator
from time import monotonic_ns

import pytest
import torch

from kvpool.engine.compute import ComputeThread
from kvpool.errors import ClosedError, ConfigError, LocalError
from kvpool.units import SECOND


@pytest.fixture
async def compute() -> AsyncIterator[ComputeThread]:
    thread = ComputeThread(1)
    yield thread
    assert await thread.close(monotonic_ns() + 10 * SECOND)


class _Gate:
    """A job that runs until it is told to end."""

    def __init__(self) -> None:
        self.started, self.may_end, self.ended = threading.Event(), threading.Event(), False

    def __call__(self) -> str:
        self.started.set()
        assert self.may_end.wait(10)
        self.ended = True
        return "done"

    async def running(self) -> None:
        await asyncio.to_thread(self.started.wait, 10)


async def test_run_returns_the_value_and_the_times(compute: ComputeThread) -> None:
    """Where the time went is part of the answer."""
    ran = await compute.run(lambda: (threading.current_thread().name, torch.get_num_threads()))
    assert ran.value == ("kvpool-compute", 1)
    assert min(ran.waited_ns, ran.took_ns) >= 0


async def test_run_raises_what_the_job_raises_and_the_thread_goes_on(compute: ComputeThread) -> None:
    """One bad request must not take the worker down; foreign errors become kvpool's."""

    def fail(error: Exception) -> None:
        raise error

    with pytest.raises(ConfigError, match="mine"):
        await compute.run(lambda: fail(ConfigError("mine")))
    with pytest.raises(LocalError, match="out of memory"):
        await compute.run(lambda: fail(RuntimeError("out of memory")))
    assert (await compute.run(lambda: 1)).value == 1


async def test_run_cancelled_while_waiting_never_runs(compute: ComputeThread) -> None:
    """Work for a client that is gone isn't begun."""
    gate, ran = _Gate(), []
    first = asyncio.create_task(compute.run(gate))
    await gate.running()
    second = asyncio.create_task(compute.run(lambda: ran.append(1)))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    gate.may_end.set()
    assert (await first).value == "done"
    await compute.run(lambda: None)
    assert ran == []


async def test_run_cancelled_while_running_ends_only_after_the_job(compute: ComputeThread) -> None:
    """When `run` is over nothing writes to the sequence any more, even if it is cancelled again and again."""
    gate = _Gate()
    task = asyncio.create_task(compute.run(gate))
    await gate.running()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    gate.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gate.ended


async def test_close_fails_what_waits_and_lets_the_running_job_end() -> None:
    """Nobody waits for ever on a closed engine."""
    compute, gate = ComputeThread(1), _Gate()
    running = asyncio.create_task(compute.run(gate))
    await gate.running()
    waiting = asyncio.create_task(compute.run(lambda: None))
    await asyncio.sleep(0)
    assert not await compute.close(monotonic_ns())
    with pytest.raises(ClosedError):
        await waiting
    with pytest.raises(ClosedError):
        await compute.run(lambda: None)
    gate.may_end.set()
    assert (await running).value == "done"
    assert await compute.close(monotonic_ns() + 10 * SECOND)
