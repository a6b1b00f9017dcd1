"""The contract of LMCache's L2 adapters as `kvpool.connectors.lmcache` keeps it, for LMCache's own classes and for their twins alike.

A *world* makes keys, memory objects and layouts: `lmcache_twin.py` where LMCache is not installed, `lmcache_real.py` where it is. Each
function of `CHECKS` takes a world and a way to open adapters on one pool, raises `AssertionError`, and needs no test runner.
"""

import os
import select
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

DEADLINE_S: Final = 60.0
Open = Callable[..., Any]
"""Opens an adapter on the pool, with further `adapter_params`; the caller of the kit closes it."""


class World(Protocol):
    """LMCache's data, real or not."""

    def key(self, chunk: bytes, *, model: str = "model", rank: int = 1, group: int = 0, salt: str = "") -> Any:
        """An `ObjectKey`."""
        ...

    def memory(self, data: bytes, shape: Sequence[int], dtype: str) -> Any:
        """A memory object of this layout with these bytes in it."""
        ...

    def layout(self, shape: Sequence[int], dtype: str) -> Any:
        """The `MemoryLayoutDesc` of such objects."""
        ...


def stored(adapter: Any, keys: Sequence[Any], objects: Sequence[Any]) -> tuple[bool, int]:
    """Store; whether it succeeded, and the bytes."""
    number = adapter.submit_store_task(list(keys), list(objects))
    done: dict[int, Any] = {}
    while number not in done:
        wait(adapter.get_store_event_fd())
        done.update(adapter.pop_completed_store_tasks())
    return done[number].is_successful(), done[number].bytes_transferred()


def found(adapter: Any, keys: Sequence[Any], layouts: dict[int, Any]) -> list[bool]:
    """Look up."""
    number = adapter.submit_lookup_and_lock_task(list(keys), layouts)
    bits = _result(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(number), len(keys))
    adapter.submit_unlock([key for key, there in zip(keys, bits, strict=True) if there])
    return bits


def loaded(adapter: Any, keys: Sequence[Any], objects: Sequence[Any]) -> list[bool]:
    """Load."""
    number = adapter.submit_load_task(list(keys), list(objects))
    return _result(adapter.get_load_event_fd(), lambda: adapter.query_load_result(number), len(keys))


def wait(fd: int) -> None:
    """Until an eventfd is readable; takes what it says."""
    ready, _, _ = select.select([fd], [], [], DEADLINE_S)
    assert ready, f"nothing was told within {DEADLINE_S:.0f} s"
    os.eventfd_read(fd)


def _result(fd: int, query: Callable[[], Any], count: int) -> list[bool]:
    bits = query()
    while bits is None:
        wait(fd)
        bits = query()
    assert query() is None, "a result is told once"
    return [bool(bits.test(i)) for i in range(count)]


SHAPE, DTYPE, NBYTES = (2, 4, 16, 8), "bfloat16", 2 * 2 * 4 * 16 * 8


def _objects(world: World, count: int, salt: int = 0) -> list[Any]:
    return [world.memory(bytes([(i * 7 + salt) % 251]) * NBYTES, SHAPE, DTYPE) for i in range(count)]


def _blank(world: World, count: int) -> list[Any]:
    return [world.memory(bytes([255]) * NBYTES, SHAPE, DTYPE) for _ in range(count)]


def _keys(world: World, name: str, count: int, **more: Any) -> list[Any]:
    return [world.key(f"{name}-{i}".encode(), **more) for i in range(count)]


def values_come_back_and_results_are_told_once(world: World, open_: Open) -> None:
    """Store, look up and load; another adapter finds the same; what isn't there is a bit that isn't set."""
    keys, objects, layouts = _keys(world, "back", 5), _objects(world, 5), {0: world.layout(SHAPE, DTYPE)}
    adapter = open_()
    fds = {adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}
    assert len(fds) == 3
    assert stored(adapter, keys[:4], objects[:4]) == (True, 4 * NBYTES)
    assert adapter.pop_completed_store_tasks() == {}
    for one in (adapter, open_()):
        assert found(one, keys, layouts) == [True] * 4 + [False]
        into = _blank(world, 5)
        assert loaded(one, [keys[4], *keys[:4]], into) == [False] + [True] * 4
        assert [bytes(o.byte_array) for o in into[1:]] == [bytes(o.byte_array) for o in objects[:4]]


def keys_that_differ_in_anything_are_other_values(world: World, open_: Open) -> None:
    """Model, rank, group, salt, chunk, layout and the operator's scope."""
    adapter, other = open_(), open_(scope="other weights")
    base = world.key(b"one")
    others = [world.key(b"two"), world.key(b"one", model="model2"), world.key(b"one", rank=2), world.key(b"one", salt="s")]
    layouts = {group: world.layout(SHAPE, DTYPE) for group in (0, 1)}
    assert stored(adapter, [base], _objects(world, 1))[0]
    assert found(adapter, [base, *others, world.key(b"one", group=1)], layouts) == [True] + [False] * 5
    assert found(other, [base], layouts) == [False]
    assert loaded(other, [base], _blank(world, 1)) == [False]
    transposed = (4, 2, 16, 8)
    assert found(adapter, [base], {0: world.layout(transposed, DTYPE)}) == [False]
    assert found(adapter, [base], {0: world.layout(SHAPE, "float16")}) == [False]
    assert loaded(adapter, [base], [world.memory(bytes(NBYTES), transposed, DTYPE)]) == [False]
    assert loaded(adapter, [base], [world.memory(bytes(NBYTES), SHAPE, "float16")]) == [False]
    assert loaded(adapter, [base], _blank(world, 1)) == [True]


def packed_objects_are_found_whatever_the_layout(world: World, open_: Open) -> None:
    """LMCache's serde stores rows of bytes and looks up by the model's layout. Another length is a miss."""
    adapter, (key,), data = open_(), _keys(world, "packed", 1), bytes(range(200))
    assert stored(adapter, [key], [world.memory(data, (200,), "uint8")]) == (True, 200)
    assert found(adapter, [key], {0: world.layout(SHAPE, DTYPE)}) == [True]
    assert found(adapter, [key], {}) == [True]
    assert loaded(adapter, [key], [world.memory(bytes(201), (201,), "uint8")]) == [False]
    into = world.memory(bytes(200), (200,), "uint8")
    assert loaded(adapter, [key], [into]) == [True]
    assert bytes(into.byte_array) == data


def first_value_stays(world: World, open_: Open) -> None:
    """Values are immutable: one that is there already counts as stored."""
    adapter, keys, first = open_(), _keys(world, "first", 1), _objects(world, 1, salt=1)
    assert stored(adapter, keys, first) == (True, NBYTES)
    assert stored(adapter, keys, _objects(world, 1, salt=2)) == (True, NBYTES)
    into = _blank(world, 1)
    assert loaded(adapter, keys, into) == [True]
    assert bytes(into[0].byte_array) == bytes(first[0].byte_array)


def many_threads_get_their_own_results(world: World, open_: Open) -> None:
    """LMCache's controllers call from threads of their own: each submits, and one for each kind polls."""
    adapter, layouts, count = open_(), {0: world.layout(SHAPE, DTYPE)}, 8
    keys = {n: _keys(world, f"thread{n}", 3) for n in range(count)}
    numbers: dict[int, int] = {}

    def store(n: int) -> None:
        numbers[n] = adapter.submit_store_task(keys[n], _objects(world, 3, salt=n))

    _at_once([lambda n=n: store(n) for n in range(count)])  # type: ignore[misc]
    done: dict[int, Any] = {}
    while len(done) < count:
        wait(adapter.get_store_event_fd())
        done.update(adapter.pop_completed_store_tasks())
    assert set(done) == set(numbers.values())
    assert all(result.is_successful() for result in done.values())
    seen: dict[str, list[bool]] = {}

    def look() -> None:
        for n in range(count):
            seen[f"look{n}"] = found(adapter, [*keys[n], world.key(b"none")], layouts)

    def load() -> None:
        for n in range(count):
            into = _blank(world, 3)
            seen[f"load{n}"] = loaded(adapter, keys[n], into)
            assert [bytes(o.byte_array) for o in into] == [bytes(o.byte_array) for o in _objects(world, 3, salt=n)]

    _at_once([look, load])
    assert seen == {f"look{n}": [True] * 3 + [False] for n in range(count)} | {f"load{n}": [True] * 3 for n in range(count)}


def closed_adapter_is_quiet(world: World, open_: Open) -> None:
    """Closing waits for what runs; later tasks are misses; a second time it does nothing."""
    adapter, keys = open_(), _keys(world, "closed", 2)
    assert stored(adapter, keys, _objects(world, 2))[0]
    number = adapter.submit_load_task(keys, _blank(world, 2))
    adapter.close()
    adapter.close()
    assert adapter.query_load_result(number) is not None
    late = adapter.submit_lookup_and_lock_task(keys, {})
    bits = adapter.query_lookup_and_lock_result(late)
    assert [bits.test(i) for i in range(2)] == [False, False]
    assert not adapter.report_status()["is_healthy"]


def _at_once(calls: Sequence[Callable[[], None]]) -> None:
    """Each in a thread of its own; raises what one of them raised."""
    failures: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not failures, failures


CHECKS: Final = (
    values_come_back_and_results_are_told_once,
    keys_that_differ_in_anything_are_other_values,
    packed_objects_are_found_whatever_the_layout,
    first_value_stays,
    many_threads_get_their_own_results,
    closed_adapter_is_quiet,
)
