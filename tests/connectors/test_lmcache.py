"""LMCache's L2 plugin on real nodes, with a stand-in for LMCache (`tests/engines` runs the same kit with LMCache itself)."""

import hashlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool.connectors.lmcache.lane import Lane
from kvpool.connectors.lmcache.names import PLAIN, layout_of, name_of
from kvpool.connectors.lmcache.settings import Settings
from kvpool.errors import ConfigError
from kvpool.testing.l2_kit import CHECKS, Open, found, loaded, stored
from kvpool.testing.lmcache_twin import TwinWorld, installed
from kvpool.testing.node_process import NodeProcess, poll

WORLD = TwinWorld()
SHAPE, DTYPE = (2, 64), "float16"
SIZE = 256


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    node = NodeProcess("--capacity", "64MiB", "--offer", "tcp,grpc", arena_dir=tmp_path_factory.mktemp("arena"))
    yield node
    assert node.stop() == 0


@pytest.fixture
def adapters() -> Iterator[Callable[..., Any]]:
    """Opens adapters with `adapter_params`, as LMCache does; all are closed in the end."""
    made: list[Any] = []
    with installed():
        from kvpool.connectors.lmcache import KvpoolL2

        def one(**params: Any) -> Any:
            made.append(KvpoolL2(params, l1_memory_desc=None))
            return made[-1]

        yield one
        for adapter in made:
            adapter.close()


@pytest.fixture
def on_node(adapters: Callable[..., Any], node: NodeProcess) -> Open:
    return lambda **more: adapters(pool=node.address, **more)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_adapter_keeps_the_contract(check: Callable[[TwinWorld, Open], None], on_node: Open) -> None:
    """The kit, on a real node."""
    check(WORLD, on_node)


def test_lmcache_is_told_what_was_stored_and_used(on_node: Open) -> None:
    """Its books and its listeners count what the pool took, not what it was asked to take."""
    adapter, keys = on_node(), [WORLD.key(b"told"), WORLD.key(b"too large")]
    objects = [WORLD.memory(bytes(SIZE), SHAPE, DTYPE), WORLD.memory(bytes(100 << 20), (100 << 20,), "uint8")]
    assert stored(adapter, keys, objects) == (False, 0)  # LMCache counts no bytes of a store that failed
    assert adapter.told_stored == [(keys[0], SIZE)]
    assert found(adapter, keys, {0: WORLD.layout(SHAPE, DTYPE)}) == [True, False]
    assert adapter.told_used == [keys[0]]
    status = adapter.report_status()
    assert status["is_healthy"]
    assert (status["stored"], status["not_stored"], status["found"], status["not_found"]) == (1, 1, 1, 1)


def test_values_leave_after_their_ttl(on_node: Open) -> None:
    """`ttl_s` reaches the pool: a value with the shortest one is gone soon, others stay."""
    short, long = on_node(ttl_s=0.001), on_node()
    key, other = WORLD.key(b"short"), WORLD.key(b"long")
    for adapter, one in ((short, key), (long, other)):
        assert stored(adapter, [one], [WORLD.memory(bytes(SIZE), SHAPE, DTYPE)])[0]
    poll(lambda: found(long, [key, other], {0: WORLD.layout(SHAPE, DTYPE)}) == [False, True], "the value is gone")


def test_pool_that_is_away_is_a_miss(adapters: Callable[..., Any], tmp_path: Path) -> None:
    """Nobody there from the start, then a node that dies: misses and failed stores, no exception, and no task is lost."""
    keys, layouts = [WORLD.key(b"away")], {0: WORLD.layout(SHAPE, DTYPE)}

    def memory() -> list[Any]:
        return [WORLD.memory(bytes([7]) * SIZE, SHAPE, DTYPE)]

    nobody = adapters(pool="127.0.0.1:1", timeout_s=1.0)
    assert found(nobody, keys, layouts) == [False]
    assert stored(nobody, keys, memory()) == (False, 0)
    assert loaded(nobody, keys, memory()) == [False]
    node = NodeProcess("--capacity", "16MiB", "--offer", "tcp,grpc", arena_dir=tmp_path)
    adapter = adapters(pool=node.address, timeout_s=1.0)
    assert stored(adapter, keys, memory()) == (True, SIZE)
    node.kill()
    assert loaded(adapter, keys, memory()) == [False]
    assert found(adapter, keys, layouts) == [False]
    assert stored(adapter, keys, memory()) == (False, 0)
    node.stop()


def test_frozen_node_is_a_miss_by_the_deadline(adapters: Callable[..., Any], tmp_path: Path) -> None:
    """A host that hangs answers nothing: each task ends by `timeout_s`, and the pool is there again when the node is."""
    node = NodeProcess("--capacity", "16MiB", "--offer", "grpc", arena_dir=tmp_path)
    adapter = adapters(pool=node.address, timeout_s=0.5)
    keys, layouts = [WORLD.key(b"frozen")], {0: WORLD.layout(SHAPE, DTYPE)}
    assert stored(adapter, keys, [WORLD.memory(bytes(SIZE), SHAPE, DTYPE)])[0]
    node.signal(signal.SIGSTOP)
    assert found(adapter, keys, layouts) == [False]
    assert loaded(adapter, keys, [WORLD.memory(bytes(SIZE), SHAPE, DTYPE)]) == [False]
    assert not stored(adapter, [WORLD.key(b"new")], [WORLD.memory(bytes(SIZE), SHAPE, DTYPE)])[0]
    node.signal(signal.SIGCONT)
    poll(lambda: loaded(adapter, keys, [WORLD.memory(bytes(SIZE), SHAPE, DTYPE)]) == [True], "the node is found again")
    assert node.stop() == 0


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({}, 'needs "pool"'),
        ({"pool": "a:1", "pol": "b:1"}, "doesn't know 'pol'"),
        ({"pool": ""}, "are texts"),
        ({"pool": "a:1", "scope": 3}, "are texts"),
        ({"pool": "a:1", "timeout_s": 0}, "timeout_s"),
        ({"pool": "a:1", "timeout_s": "1"}, "timeout_s"),
        ({"pool": "a:1", "timeout_s": True}, "timeout_s"),
        ({"pool": "a:1", "ttl_s": float("nan")}, "ttl_s"),
        ({"pool": "a:1", "waiting": 0}, "waiting"),
        ({"pool": "a:1", "waiting": 1.5}, "waiting"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(params: dict[str, Any], why: str) -> None:
    """When LMCache's server starts, by name."""
    with pytest.raises(ConfigError, match=why):
        Settings.of(params)


def test_wrong_pool_is_refused_at_once(adapters: Callable[..., Any]) -> None:
    """A typing error isn't a pool that is away."""
    with pytest.raises(ConfigError):
        adapters(pool="not an address")
    with pytest.raises(ConfigError):
        adapters(pool="127.0.0.1:1", transport="pigeon")


def test_names_are_what_they_were() -> None:
    """Values outlive a version of kvpool; layouts are spelled as torch spells element types."""
    key = WORLD.key(b"\x01\x02", model="m/x", rank=257, group=3, salt="s")
    spelled = b"\3\0\0\0m/x" + b"\1\0\0\0s" + b"\x13\0\0\0torch.bfloat16[2,3]" + b"\2\0\0\0\1\2" + b"\1\1" + bytes(6) + b"\3" + bytes(7)
    assert name_of(key, "torch.bfloat16[2,3]") == hashlib.sha256(spelled).digest()
    assert name_of(key, "torch.bfloat16[2,3]").hex() == "5d63416410a652122a0a9ae258a4aa03a286f43e42cc4c3980444ad7dd6bcc56"
    assert layout_of([(2, 3), (4,)], ["torch.bfloat16", "torch.uint8"]) == "torch.bfloat16[2,3];torch.uint8[4]"
    assert layout_of([(4,)], ["torch.uint8"]) == layout_of([], []) == PLAIN


class Clock:
    """Seconds that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_lane_bounds_what_waits_and_for_how_long() -> None:
    """A task that is done blocks the lane: of three more, two wait, the third isn't taken; then one is late, and one is left at the end."""
    clock, may_end, has_begun = Clock(), threading.Event(), threading.Event()

    def slow() -> str:
        has_begun.set()
        may_end.wait(60)
        return "done"

    lane = Lane[str]("test", waiting=2, patience_s=10, clock=clock)
    first = lane.submit(slow, lambda: "missed")
    assert has_begun.wait(60)
    late = lane.submit(lambda: "done", lambda: "late")
    clock.now = 5
    good = lane.submit(lambda: "done", lambda: "late")
    over = lane.submit(lambda: "done", lambda: "over")
    assert select.select([lane.fd], [], [], 60)[0]
    assert lane.pop_all() == {over: "over"}
    clock.now = 12
    may_end.set()
    results: dict[int, str] = {}
    while len(results) < 3:
        assert select.select([lane.fd], [], [], 60)[0]
        os.eventfd_read(lane.fd)
        results |= lane.pop_all()
    assert results == {first: "done", late: "late", good: "done"}
    assert lane.given_up == 2
    assert lane.alive
    lane.close()
    lane.close()
    assert not lane.alive


def test_lane_goes_on_after_a_task_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    """The failure is in the log, its task is a miss."""
    lane = Lane[int]("test", waiting=8, patience_s=60)
    numbers = [lane.submit(lambda: 1 // 0, lambda: -1), lane.submit(lambda: 5, lambda: -1)]
    results: dict[int, int] = {}
    while len(results) < 2:
        assert select.select([lane.fd], [], [], 60)[0]
        os.eventfd_read(lane.fd)
        results |= lane.pop_all()
    lane.close()
    assert [results[n] for n in numbers] == [-1, 5]
    assert "ZeroDivisionError" in caplog.text


def test_lane_that_closes_leaves_no_task_unanswered() -> None:
    """What waits is missed, what runs is waited for."""
    may_end, has_begun = threading.Event(), threading.Event()

    def slow() -> str:
        has_begun.set()
        may_end.wait(60)
        return "done"

    lane = Lane[str]("test", waiting=8, patience_s=60)
    running = lane.submit(slow, lambda: "missed")
    assert has_begun.wait(60)
    waiting = lane.submit(slow, lambda: "missed")
    threading.Timer(0.05, may_end.set).start()
    lane.close()
    late = lane.submit(slow, lambda: "missed")
    assert lane.pop_all() == {running: "done", waiting: "missed", late: "missed"}
