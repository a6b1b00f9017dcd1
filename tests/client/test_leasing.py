"""Leases that outlive nobody: sized by bytes, renewed while a transfer runs, and what happens when one is lost."""

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.block import Namespace
from kvpool.client import AsyncPoolClient, leasing
from kvpool.client.leasing import BASE_MS, MARGIN_MS, SLOWEST_BYTES_PER_MS, keep_alive, lease_ms
from kvpool.client.transfer import Payload
from kvpool.errors import DeadlineError
from kvpool.testing.node_process import NodeProcess
from kvpool.units import SECOND
from kvpool.wire.pool_client import PoolRpc


def far() -> int:
    return time.monotonic_ns() + 100_000 * SECOND


def test_lease_grows_with_the_bytes_and_ends_with_the_deadline() -> None:
    """A reader of much needs long; a reader that died must not hold much for long."""
    assert lease_ms(0, far()) == BASE_MS
    assert lease_ms(1000 * SLOWEST_BYTES_PER_MS, far()) == BASE_MS + 1000
    assert lease_ms(1 << 40, time.monotonic_ns()) == MARGIN_MS


class Rpc:
    """Answers renewals as told."""

    def __init__(self, *answers: bool | DeadlineError) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def renew(self, lease_id: int, length_ms: int, timeout_s: float) -> bool:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, DeadlineError):
            raise answer
        return answer


def transfer(*rpcs: Rpc) -> Any:
    leases = [SimpleNamespace(link=SimpleNamespace(rpc=rpc, node=SimpleNamespace(node_id="n" * 32)), id=5) for rpc in rpcs]
    return SimpleNamespace(leases=leases, lost=set())


async def test_renewal_goes_on_over_a_node_that_does_not_answer_and_stops_at_a_lost_lease() -> None:
    """A lost message is no lost lease; a lost lease is the end, because the bytes may be somebody else's by now."""
    rpc = Rpc(True, DeadlineError("slow"), True, False)
    moving = transfer(rpc)
    async with asyncio.timeout(20):
        await keep_alive(moving, 3)
    assert rpc.asked == 4
    assert moving.lost == {0}


async def test_lost_lease_leaves_the_others_alive() -> None:
    """Another node's blocks are still there to be read or written."""
    lost, kept = Rpc(False), Rpc(True, True, True, False)
    moving = transfer(lost, kept)
    async with asyncio.timeout(20):
        await keep_alive(moving, 3)
    assert (lost.asked, kept.asked) == (1, 4)


async def test_renewal_of_nothing_leased_ends_at_once() -> None:
    """A transfer without a lease has nothing to keep."""
    async with asyncio.timeout(20):
        await keep_alive(transfer(), 3)


async def test_lease_shorter_than_the_transfer_is_renewed_until_its_end(
    node: NodeProcess, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transfer outlasts its first lease several times over, the pool is full meanwhile, and every byte is right."""
    monkeypatch.setattr(leasing, "BASE_MS", 300)
    renewed = asyncio.Semaphore(0)
    real = PoolRpc.renew

    async def counted(self: PoolRpc, lease_id: int, length_ms: int, timeout_s: float) -> bool:
        alive = await real(self, lease_id, length_ms, timeout_s)
        renewed.release()
        return alive

    monkeypatch.setattr(PoolRpc, "renew", counted)
    loop = asyncio.get_running_loop()

    def slow(touch: Callable[[int, Payload], None]) -> Callable[[int, Payload], None]:
        """Each block waits for two renewals: 200 ms of a lease of 300 ms."""

        def wait(index: int, payload: Payload) -> None:
            for _ in range(2):
                asyncio.run_coroutine_threadsafe(renewed.acquire(), loop).result(20)
            touch(index, payload)

        return wait

    def fill(index: int, payload: Payload) -> None:
        payload[:] = index + 1

    got: list[int] = []

    def sink(index: int, payload: Payload) -> None:
        assert np.all(payload == index + 1)
        got.append(index)

    async with await AsyncPoolClient.open(node.address, namespace, transport="grpc") as client:
        chain, counts = client.keys(range(16 * 6)), [16] * 6
        deadline_ns = time.monotonic_ns() + 60 * SECOND
        assert await client.store(chain, 0, counts, slow(fill), deadline_ns=deadline_ns) == 6
        assert await client.load(chain, 0, counts, slow(sink), deadline_ns=deadline_ns) == 6
    assert got == list(range(6))
