"""A synchronous client and nodes that answer keys over TCP: asked in the caller's thread, and what that doesn't bring comes otherwise."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvpool
from kvpool.block import Namespace
from kvpool.client import Client
from kvpool.errors import ClosedError, DeadlineError, KvpoolError, UnavailableError
from kvpool.testing.node_process import NodeProcess, poll
from kvpool.transport.tcp import TcpReach
from kvpool.wire.pool_client import PoolRpc

BLOCKS = 6 * 32
ROW = 512 * 16
TOKENS = list(range(16 * BLOCKS))
ROWS = np.random.default_rng(1).integers(0, 256, (BLOCKS, ROW), dtype=np.uint8)


@pytest.fixture
def namespace(namespace: Namespace) -> Namespace:
    """Always the same, so that of its extents each of the two nodes always owns some."""
    return replace(namespace, model="elsewhere")


@pytest.fixture
def nodes(start_node: Callable[..., NodeProcess]) -> list[NodeProcess]:
    """Two nodes that share every chain of more than an extent."""
    return [start_node("--id", f"{i:032x}", "--offer", "shm,tcp,grpc") for i in (1, 2)]


def source_of(nodes: list[NodeProcess]) -> str:
    return ",".join(node.address for node in nodes)


@pytest.fixture
def pool(nodes: list[NodeProcess], namespace: Namespace) -> Iterator[Client]:
    """Connected, and all blocks of `TOKENS` are there."""
    with kvpool.connect(source_of(nodes), namespace=namespace, transport="tcp", timeout_s=3) as made:
        assert made.put(TOKENS, ROWS) == 16 * BLOCKS
        yield made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is asked of nodes, by gRPC or by TCP, and for how many blocks."""
    made: list[tuple[str, int]] = []
    for owner, name in ((PoolRpc, "lookup"), (PoolRpc, "acquire"), (TcpReach, "get"), (TcpReach, "probe")):
        real = getattr(owner, name)

        def noted(self: Any, *args: Any, name: str = name, real: Any = real, **options: Any) -> Any:
            made.append((name, len(args[2] if name == "acquire" else args[0])))
            return real(self, *args, **options)

        monkeypatch.setattr(owner, name, noted)
    return made


def without_loop(monkeypatch: pytest.MonkeyPatch, pool: Client) -> None:
    def never(work: Any) -> Any:
        work.close()
        raise AssertionError("the event loop was asked")

    monkeypatch.setattr(pool, "_run", never)


def right(out: npt.NDArray[np.uint8]) -> list[bool]:
    return [bool(np.array_equal(mine, row)) for mine, row in zip(out, ROWS, strict=False)]


def test_all_is_asked_in_the_callers_thread(pool: Client, calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """One message a node, for one block and for many, with and without an array to fill."""
    with monkeypatch.context() as patch:
        without_loop(patch, pool)
        out = np.zeros_like(ROWS)
        assert pool.get(TOKENS, out).tokens == 16 * BLOCKS
        assert all(right(out))
        assert [name for name, _ in calls] == ["get", "get"]
        assert sum(count for _, count in calls) == BLOCKS
        assert pool.lookup(TOKENS) == 16 * BLOCKS
        assert [name for name, _ in calls[2:]] == ["probe", "probe"]
        one = np.zeros_like(ROWS[:1])
        assert pool.get(TOKENS[:16], one).tokens == 16
        assert all(right(one))
        got = pool.get(TOKENS)
        assert np.array_equal(got.blocks.view(np.uint8).reshape(BLOCKS, -1), ROWS)
        assert pool.lookup([]) == 0
    assert pool._client.pool.direct()["hits"] == 2 * BLOCKS + 1


def test_nodes_of_this_host_and_elsewhere_in_one_call(
    nodes: list[NodeProcess], pool: Client, calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block by its shortest way."""
    with kvpool.connect(source_of(nodes), namespace=pool._client.pool.namespace) as mixed:
        links = mixed._client.pool._core.links
        first, second = links.nodes()
        mixed._run(links.link(first, 5))
        monkeypatch.setattr(links, "_transport", "tcp")
        mixed._run(links.link(second, 5))
        assert sorted(mixed._client.pool.reaches().values()) == ["shm", "tcp"]
        calls.clear()
        with monkeypatch.context() as patch:
            without_loop(patch, mixed)
            out = np.zeros_like(ROWS)
            assert mixed.get(TOKENS, out).tokens == 16 * BLOCKS
            assert all(right(out))
            assert mixed.lookup(TOKENS) == 16 * BLOCKS
        assert [name for name, _ in calls] == ["get", "probe"]
        assert 0 < calls[0][1] == calls[1][1] < BLOCKS


def test_what_has_come_is_not_asked_for_again(pool: Client, calls: list[tuple[str, int]]) -> None:
    """Only what is missing goes on to the event loop, which asks for it by key and then under leases."""
    longer = [*TOKENS, *range(32)]
    out = np.zeros((BLOCKS + 2, ROW), np.uint8)
    assert pool.get(longer, out).tokens == 16 * BLOCKS
    assert all(right(out))
    asked = {name: sum(count for one, count in calls if one == name) for name, _ in calls}
    assert asked == {"get": BLOCKS + 4, "acquire": asked["acquire"]}
    assert asked["acquire"] <= 4
    calls.clear()
    assert pool.lookup(longer) == 16 * BLOCKS
    asked = {name: sum(count for one, count in calls if one == name) for name, _ in calls}
    assert asked == {"probe": BLOCKS + 4, "lookup": asked["lookup"]}
    assert asked["lookup"] <= 4


def test_wrong_byte_is_never_delivered(pool: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is damaged on the wire is asked for again under a lease."""
    real = TcpReach.get

    def damaging(self: TcpReach, wants: Any, deadline_ns: int, check: Callable[[int], bool]) -> list[bool]:
        def damaged(number: int) -> bool:
            if number % 3 == 0:
                part = wants[number][2 + number % 2]
                part[number % part.size] ^= 1 << number % 8
            return check(number)

        return real(self, wants, deadline_ns, damaged)

    monkeypatch.setattr(TcpReach, "get", damaging)
    out = np.zeros_like(ROWS)
    assert pool.get(TOKENS, out).tokens == 16 * BLOCKS
    assert all(right(out))


@pytest.mark.parametrize("error", [UnavailableError("cut"), ClosedError("given up"), DeadlineError("slow")])
def test_failure_is_judged_and_costs_no_block(pool: Client, monkeypatch: pytest.MonkeyPatch, error: KvpoolError) -> None:
    """As on the event loop: the connection is given up, or the node rests a moment, and all is there again."""
    real, left = TcpReach.get, [1]

    def failing(self: TcpReach, *args: Any) -> list[bool]:
        if left[0]:
            left[0] -= 1
            raise error
        return real(self, *args)

    monkeypatch.setattr(TcpReach, "get", failing)
    core = pool._client.pool._core
    out = np.zeros_like(ROWS)
    pool.get(TOKENS, out)
    assert sum(core.links.health.doubted(ref) for ref in core.links.nodes()) == 1
    poll(lambda: pool.get(TOKENS, out).tokens == 16 * BLOCKS, "the node isn't asked again")
    assert all(right(out))
    assert left == [0]


def test_failures_are_forgotten_once_a_node_answers(pool: Client) -> None:
    """A read by key is a sign of life as any other."""
    core = pool._client.pool._core
    ref = core.links.nodes()[0]
    core.links.health.failed(ref, "data", time.monotonic_ns() - 2 * 10**9)
    assert core.links.health.doubted(ref)
    out = np.zeros_like(ROWS)

    def well() -> bool:
        assert pool.get(TOKENS, out).tokens == 16 * BLOCKS
        return not core.links.health.doubted(ref)

    poll(well, "the failure is remembered")


def test_node_that_dies_ends_in_a_shorter_prefix(nodes: list[NodeProcess], pool: Client) -> None:
    """What the other one has still counts where it leads."""
    victim = other_than_first(nodes, pool)
    victim.kill()

    def shorter() -> bool:
        out = np.zeros_like(ROWS)
        got = pool.get(TOKENS, out).tokens // 16
        assert got > 0
        assert all(right(out)[:got])
        return got < BLOCKS

    poll(shorter, "the dead node's process for TCP lives on")
    assert 0 < pool.lookup(TOKENS) < 16 * BLOCKS


def test_node_that_freezes_ends_in_a_shorter_prefix(nodes: list[NodeProcess], pool: Client) -> None:
    """By the deadlines."""
    victim = other_than_first(nodes, pool)
    frozen = [victim.process.pid, *children_of(victim.process.pid)]
    assert len(frozen) > 1
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        began, out = time.monotonic(), np.zeros_like(ROWS)
        got = pool.get(TOKENS, out).tokens // 16
        assert time.monotonic() - began < 15
        assert 0 < got < BLOCKS
        assert all(right(out)[:got])
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    poll(lambda: pool.get(TOKENS, out).tokens == 16 * BLOCKS, "the node isn't asked again")


def other_than_first(nodes: list[NodeProcess], pool: Client) -> NodeProcess:
    """The node that has not the first blocks; it has some others."""
    placed, _ = pool._client.pool._core.placed(pool.keys(TOKENS), 0, BLOCKS)
    (first,) = placed[0].targets
    assert any(one.targets != (first,) for one in placed)
    return next(node for node in nodes if node.node_id != first)


def children_of(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def test_closed_client_says_so(nodes: list[NodeProcess], pool: Client) -> None:
    """No thread is asked for what no client is there for."""
    near, chain = pool._nearby, pool.keys(TOKENS)
    pool.close()
    with pytest.raises(ClosedError):
        pool.get(TOKENS, np.zeros_like(ROWS))
    with pytest.raises(ClosedError):
        near.present(chain)
