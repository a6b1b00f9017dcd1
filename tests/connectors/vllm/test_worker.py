"""A rank's side over a real node: every byte arrives, and whatever the pool does the engine is told the truth in time."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from kvpool.connectors.vllm.messages import StepReport
from kvpool.testing.killing_relay import KillingRelay
from kvpool.testing.node_process import NodeProcess, poll
from tests.connectors.vllm.ranks import Rank

MIB = 1 << 20


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    """One that no test harms."""
    process = NodeProcess("--capacity", "256MiB")
    yield process
    process.stop()


@pytest.fixture
def rank() -> Iterator[Callable[..., Rank]]:
    """Ranks, closed behind the test."""
    with ExitStack() as stack:

        def start(pool: str, **options: Any) -> Rank:
            one = Rank(pool, **options)
            stack.callback(one.close)
            return one

        yield start


def test_blocks_go_from_one_engine_to_another_without_a_copy_between(node: NodeProcess, rank: Callable[..., Rank]) -> None:
    """On one host payloads are the arena itself, out and in; only the blocks asked for change."""
    one, other = rank(node.address, seed=1), rank(node.address, seed=2)
    before = other.kv.clone()
    assert one.saved("a", [3, 5, 7, 9]) == 4
    assert other.found("a", 6) == 4
    other.step("a", load=(1, [20, 30, 10]))
    assert other.report() == StepReport()
    assert other.worker.invalid_blocks() == set()
    for mine, theirs in ((20, 5), (30, 7), (10, 9)):
        assert torch.equal(other.kv[:, mine], one.kv[:, theirs])
    rest = [block for block in range(other.kv.shape[1]) if block not in (10, 20, 30)]
    assert torch.equal(other.kv[:, rest], before[:, rest])
    assert min(one.pages.roots + other.pages.roots) >= 256 * MIB
    counts = other.worker.counts()
    assert (counts["load_blocks"], counts["loads_within_step"]) == (3, 1)
    assert counts["load_bytes"] == 3 * other.kv[:, 0].numel() * 2


def test_saved_again_is_held_and_not_copied(node: NodeProcess, rank: Callable[..., Rank]) -> None:
    """Two engines that compute the same prompt at once."""
    one = rank(node.address)
    assert one.saved("b", [1, 2]) == 2
    one.worker.counts()
    assert one.saved("b", [1, 2, 3]) == 3
    assert one.worker.counts()["save_bytes"] == one.kv[:, 0].numel() * 2


def test_load_beside_the_steps_is_reported_when_it_is_over(node: NodeProcess, rank: Callable[..., Rank]) -> None:
    """vLLM lets the request wait until it is named."""
    one, other = rank(node.address, seed=3), rank(node.address, seed=4)
    one.saved("c", [1, 2])
    other.step("c", load=(0, [8, 9]), within_step=False)
    other.report()
    assert other.worker.received() == {"c"}
    assert other.worker.received() == set()
    assert torch.equal(other.kv[:, [8, 9]], one.kv[:, [1, 2]])


def test_short_load_names_the_blocks_that_did_not_come(node: NodeProcess, rank: Callable[..., Rank]) -> None:
    """Evicted between lookup and load: the leading run is good, the rest is computed."""
    one, other = rank(node.address), rank(node.address, seed=5)
    one.saved("d", [1, 2])
    other.step("d", load=(0, [4, 5, 6]), within_step=False)
    assert other.report().short == {"d": 2}
    assert other.worker.invalid_blocks() == {6}
    assert other.worker.received() == {"d"}
    assert torch.equal(other.kv[:, [4, 5]], one.kv[:, [1, 2]])


def test_nothing_is_saved_behind_a_failed_load_until_the_scheduler_knows(node: NodeProcess, rank: Callable[..., Rank]) -> None:
    """The step computed on blocks that hold nothing: its bytes must never be found under the key of the right ones."""
    one = rank(node.address)
    one.step("e", load=(0, [1]), save=(1, [2]))
    report = one.report()
    assert (report.short, report.saved, report.failed_within) == ({"e": 0}, {1: [0]}, 1)
    one.step("e", save=(1, [2]), failures_seen=0)
    assert one.report().saved == {2: [0]}
    assert one.worker.counts()["dropped_blocks"] == 2
    one.step("e", save=(0, [1, 2]))
    assert one.report().saved == {3: [2]}


def test_hand_off_is_over_with_its_step(node: NodeProcess, rank: Callable[..., Rank]) -> None:
    """The engine that goes on finds the blocks as soon as it can know of them."""
    one, other = rank(node.address), rank(node.address)
    one.step("f", save=(0, [1, 2, 3]))
    one.step("f", save=(3, [4]), hand_off=True)
    assert other.found("f", 4) == 4


def test_killed_node_is_a_miss_and_a_new_one_is_used(rank: Callable[..., Rank]) -> None:
    """No error reaches the engine; whoever comes back at the address is the pool."""
    process = NodeProcess("--capacity", "64MiB")
    with ExitStack() as stack:
        stack.callback(lambda: process.stop())
        one = rank(process.address)
        assert one.saved("g", [1, 2]) == 2
        process.kill()
        one.step("g", load=(0, [4, 5]), within_step=False)
        assert one.report().short == {"g": 0}
        assert one.worker.invalid_blocks() == {4, 5}
        assert one.worker.received() == {"g"}
        assert one.saved("h", [1]) == 0
        again = NodeProcess("--capacity", "64MiB", "--listen", process.address)
        stack.callback(again.stop)
        one.until_usable("i")


@pytest.mark.parametrize("within_step", [True, False])
def test_node_killed_amid_a_load_leaves_a_good_prefix(within_step: bool, rank: Callable[..., Rank]) -> None:
    """What came before is right, byte for byte; what did not is named."""
    process = NodeProcess("--capacity", "64MiB")
    with ExitStack() as stack:
        stack.callback(process.stop)
        relay = stack.enter_context(KillingRelay(process.address, process.kill))
        one = rank(relay.address, transport="grpc", shape=(4, 40, 4, 64, 512))
        ids, into = list(range(1, 17)), list(range(20, 36))
        assert one.saved("j", ids) == 16
        nbytes = one.kv[:, 0].numel() * 2
        relay.arm(11 * nbytes + nbytes // 2)
        one.step("j", load=(0, into), within_step=within_step)
        report = one.report()
        came = report.short["j"]
        assert relay.killed.is_set()
        assert came < 16
        assert one.worker.invalid_blocks() == set(into[came:])
        assert torch.equal(one.kv[:, into[:came]], one.kv[:, ids[:came]])
        assert report.failed_within == within_step


def test_frozen_node_is_waited_for_until_the_deadline(rank: Callable[..., Rank]) -> None:
    """Neither lookups nor loads nor saves hang."""
    process = NodeProcess("--capacity", "64MiB")
    with ExitStack() as stack:
        stack.callback(process.stop)
        one = rank(process.address, transport="grpc", load_s=0.3, save_s=0.3)
        assert one.saved("k", [1, 2]) == 2
        process.signal(signal.SIGSTOP)
        began = time.monotonic()
        assert one.found("k", 2) == 0
        one.step("k", load=(0, [4, 5]))
        assert one.report().short == {"k": 0}
        assert one.saved("l", [1]) == 0
        assert time.monotonic() - began < 20
        process.signal(signal.SIGCONT)
        one.until_usable("m")


def test_pool_that_comes_later_is_used(rank: Callable[..., Rank]) -> None:
    """An engine may start first."""
    probe = NodeProcess("--capacity", "64MiB")
    probe.stop()
    one = rank(probe.address)
    assert one.found("n", 1) == 0
    assert one.saved("n", [1]) == 0
    later = NodeProcess("--capacity", "64MiB", "--listen", probe.address)
    try:
        one.until_usable("o")
    finally:
        later.stop()


def test_layers_come_one_by_one_where_they_can(node: NodeProcess, rank: Callable[..., Rank]) -> None:
    """72 MiB, enough to be worth it: each layer is whole when the forward may read it."""
    shape = (6, 25, 4, 64, 1024)
    one, other = rank(node.address, shape=shape), rank(node.address, seed=6, shape=shape, load="layers")
    ids = list(range(1, 25))
    assert one.saved("p", ids) == 24
    seen: list[bool] = []
    wait = other.worker.wait_layer

    def looked(name: str) -> None:
        wait(name)
        layer = int(name.removeprefix("layer"))
        seen.append(torch.equal(other.kv[layer, 1:], one.kv[layer, 1:]))

    other.worker.wait_layer = looked  # type: ignore[method-assign]
    other.step("p", load=(0, ids))
    assert seen == [True] * 6
    assert other.report() == StepReport()
    small = rank(node.address, seed=7, shape=shape, load="layers")
    small.step("p", load=(0, ids[:2]))
    assert torch.equal(small.kv[:, :3][:, 1:], one.kv[:, :3][:, 1:])
    small.step("q", load=(0, [1]))
    assert small.report().short == {"q": 0}
    poll(lambda: small.worker.drain(1), "nothing runs")
