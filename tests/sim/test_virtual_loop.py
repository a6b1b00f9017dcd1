"""Real asyncio code in virtual time: clocks that jump, processes that freeze and die."""

import asyncio
import time
from random import Random

from kvpool.testing.sim.cluster.vloop import Process, VirtualLoop, current_process, virtual_time
from kvpool.units import MS, SECOND


def world() -> tuple[VirtualLoop, Process]:
    loop = VirtualLoop(Random(1), 100)
    return loop, Process(loop, "p", "h")


def test_virtual_loop_sleeps_in_no_time_and_tells_it() -> None:
    """An hour of a simulated cluster must not take one."""
    loop, process = world()
    seen: list[tuple[str, int]] = []

    async def work() -> None:
        await asyncio.sleep(3600)
        seen.append((current_process().name, time.monotonic_ns()))

    with virtual_time(loop):
        process.spawn(work())
        loop.run(until_ns=3601 * SECOND)
    assert seen == [("p", 3600 * SECOND)]
    loop.finish()


def test_virtual_loop_frozen_process_goes_on_later_and_others_meanwhile() -> None:
    """SIGSTOP: what came due while it was stopped happens at once when it goes on."""
    loop, process = world()
    other, ticks = Process(loop, "q", "h"), list[tuple[str, int]]()

    async def tick() -> None:
        for _ in range(3):
            await asyncio.sleep(0.01)
            ticks.append((current_process().name, loop.now_ns // MS))

    process.spawn(tick())
    other.spawn(tick())
    loop.later(15 * MS, process.freeze)
    loop.later(100 * MS, process.thaw)
    loop.run(until_ns=SECOND)
    assert [at for name, at in ticks if name == "q"] == [10, 20, 30]
    assert [at for name, at in ticks if name == "p"] == [10, 100, 110]
    loop.finish()


def test_virtual_loop_killed_process_runs_no_finally_until_the_world_ends() -> None:
    """kill -9 is not a cancellation."""
    loop, process = world()
    ended: list[int] = []

    async def work() -> None:
        try:
            await asyncio.sleep(1)
        finally:
            ended.append(loop.now_ns)

    task = process.spawn(work())
    loop.later(SECOND // 2, process.kill)
    loop.run(until_ns=5 * SECOND)
    assert not ended
    process.bury()
    loop.finish()
    assert task.done()
    assert ended


def test_virtual_loop_thread_that_waits_gets_late_and_stops_nobody() -> None:
    """A blocking call in a thread costs its caller time, not the loop."""
    loop, process = world()
    done: list[int] = []

    def block() -> int:
        loop.owe_until(loop.now_ns + 2 * SECOND)
        return loop.clock_ns()

    async def work() -> None:
        at_ns = await asyncio.to_thread(block)
        assert at_ns <= loop.now_ns
        done.append(loop.now_ns // SECOND)

    async def quick() -> None:
        await asyncio.sleep(1)
        done.append(loop.now_ns // SECOND)

    process.spawn(work())
    process.spawn(quick())
    loop.run(until_ns=5 * SECOND)
    assert done == [1, 2]
    loop.finish()


def test_virtual_loop_stops_at_events_and_at_trouble() -> None:
    """A phase ends by its budget, a world by the first broken promise."""
    loop, _ = world()

    def event() -> None:
        loop.events += 1
        loop.later(MS, event)

    event()
    loop.run(events=10)
    assert (loop.events, loop.now_ns) == (10, 9 * MS)
    loop.later(0, lambda: setattr(loop, "trouble", "broken"))
    loop.run(events=1000)
    assert loop.events < 12
    loop.finish()
