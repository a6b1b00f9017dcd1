"""Two copies on three node processes, over every reach: a node that is killed or stopped amid a load costs no block."""

import asyncio
import signal
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from kvpool.block import Namespace
from kvpool.client import AsyncPoolClient, asking, transfer, writing
from kvpool.testing.node_process import NodeProcess
from kvpool.units import MS, SECOND

BLOCKS = 6 * 32
COUNTS = [16] * BLOCKS
TOKENS = list(range(16 * BLOCKS))


def soon() -> int:
    return time.monotonic_ns() + 60 * SECOND


def content(index: int, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(index).integers(0, 256, nbytes, dtype=np.uint8)


def fill(index: int, payload: npt.NDArray[np.uint8]) -> None:
    payload[:] = content(index, payload.nbytes)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("reach", ["shm", "ucx", "grpc"])
async def test_signal_to_a_node_amid_a_load_costs_no_block(
    start_node: Callable[..., NodeProcess], namespace: Namespace, monkeypatch: pytest.MonkeyPatch, reach: str, number: signal.Signals
) -> None:
    """Every block comes once, in order and right, in this load and in the next, and another chain can be stored and loaded."""
    monkeypatch.setattr(transfer, "WINDOW_BYTES", 70_000)
    monkeypatch.setattr(transfer, "STALL_NS", 200 * MS)
    for module in (asking, writing):
        monkeypatch.setattr(module, "CONTROL_S", 60.0)  # whoever waits for the stopped node's answer runs into the time limit
    nodes = [start_node("--id", f"{i:032x}") for i in range(1, 4)]
    seen: list[int] = []

    def check(index: int, payload: npt.NDArray[np.uint8]) -> None:
        assert np.array_equal(payload, content(index, payload.nbytes))
        seen.append(index)
        if index == 30:
            nodes[1].signal(number)

    async with await AsyncPoolClient.open(",".join(node.address for node in nodes), namespace, transport=reach, copies=2) as pool:
        chain, other = pool.keys(TOKENS), pool.keys([7, *TOKENS[1:]])
        assert await pool.store(chain, 0, COUNTS, fill, deadline_ns=soon()) == BLOCKS
        assert pool.under_replicated == 0
        async with asyncio.timeout(50):
            for _ in range(2):
                assert await pool.load(chain, 0, COUNTS, check, deadline_ns=soon()) == BLOCKS
            assert await pool.store(other, 0, COUNTS, fill, deadline_ns=soon()) == BLOCKS
            assert await pool.load(other, 0, COUNTS, check, deadline_ns=soon()) == BLOCKS
        assert pool.under_replicated > 0
    assert seen == 3 * list(range(BLOCKS))
