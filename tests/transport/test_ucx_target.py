"""The serving thread: ends when told, sleeps when idle, and outlives its clients."""

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import ConfigError, DeadlineError, UnavailableError
from kvpool.testing.arena_owner import ArenaOwner
from kvpool.transport import Run
from kvpool.transport.ucx import UcxReach, UcxTarget
from kvpool.transport.ucx.process import encode_offer
from kvpool.units import MIB, MS, SECOND

PATIENCE_S = 30


def soon() -> int:
    return time.monotonic_ns() + PATIENCE_S * SECOND


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.005)


def serving_threads() -> int:
    return sum(thread.name == "kvpool-ucx-target" for thread in threading.enumerate())


@pytest.fixture
def owner() -> Iterator[ArenaOwner]:
    with ArenaOwner(64 * MIB, ucx=True) as started:
        yield started


def test_target_in_this_process_serves_until_closed() -> None:
    """Closing twice is fine; afterwards a client gets an error, no hang."""
    arena = np.arange(256, dtype=np.uint8)
    target = UcxTarget(arena)
    reach, into = UcxReach(target.offer), np.zeros(3, np.uint8)
    reach.read([Run(5, 3, 0)], into, lease_id=0, deadline_ns=soon())
    assert into.tolist() == [5, 6, 7]
    assert (target.alive, serving_threads()) == (True, 1)
    assert target.library.startswith("UCX ")
    target.close()
    target.close()
    assert (target.alive, serving_threads()) == (False, 0)
    with pytest.raises((UnavailableError, DeadlineError)):
        reach.read([Run(5, 3, 0)], into, lease_id=0, deadline_ns=soon())
    reach.close()


def test_target_forgotten_stops_its_thread() -> None:
    """A lost reference must not leave a thread and registered memory behind."""
    target = UcxTarget(np.zeros(64, np.uint8))
    assert serving_threads() == 1
    del target
    gc.collect()
    assert serving_threads() == 0


def test_many_targets_and_reaches_leave_no_descriptor_behind() -> None:
    """Connections come and go for as long as a process lives."""
    UcxTarget(np.zeros(64, np.uint8)).close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        target = UcxTarget(np.zeros(64, np.uint8))
        UcxReach(target.offer).close()
        target.close()
        del target
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("arena", [np.zeros(0, np.uint8), np.zeros((2, 2), np.uint8), np.zeros(8, np.uint8)[::2]])
def test_target_of_something_else_than_an_arena_refused(arena: np.ndarray) -> None:
    """What is offered must be one stretch of memory."""
    with pytest.raises(ConfigError, match="contiguous"):
        UcxTarget(arena)


def test_idle_target_sleeps(owner: ArenaOwner) -> None:
    """An idle node costs no CPU: all its threads are asleep, again and again."""
    reach = UcxReach(owner.ucx_offer())
    reach.read([Run(0, MIB, 0)], np.zeros(MIB, np.uint8), lease_id=0, deadline_ns=soon())
    asleep = 0

    def ten_times_in_a_row() -> bool:
        nonlocal asleep
        states = {path.read_text().rsplit(")", 1)[1].split()[0] for path in Path(f"/proc/{owner.pid}/task").glob("*/stat")}
        asleep = asleep + 1 if states == {"S"} else 0
        return asleep >= 10

    eventually(ten_times_in_a_row, "all threads of the owner asleep")
    reach.close()


CLIENT = """
import sys, time
import numpy as np
from kvpool.transport import Run
from kvpool.transport.ucx import UcxReach
from kvpool.transport.ucx.process import decode_offer
reach = UcxReach(decode_offer(sys.argv[1]))
buffer, runs = np.zeros(1 << 25, np.uint8), [Run(i << 20, 1 << 20, i << 20) for i in range(32)]
move = reach.read if sys.argv[2] == "read" else reach.write
print("up", flush=True)
while True:
    move(runs, buffer, lease_id=0, deadline_ns=time.monotonic_ns() + 10**10)
"""


@pytest.mark.parametrize("what", ["read", "write"])
def test_clients_killed_on_the_way_leave_the_target_serving(owner: ArenaOwner, what: str) -> None:
    """UCX aborts a target that owes a vanished peer a second answer; ours never does (see lane.py)."""
    into = np.zeros(MIB, np.uint8)
    for _ in range(4):
        command = [sys.executable, "-c", CLIENT, encode_offer(owner.ucx_offer()), what]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == b"up\n"
            client.kill()
        with_another = UcxReach(owner.ucx_offer())
        with_another.read([Run(0, MIB, 0)], into, lease_id=0, deadline_ns=soon())
        with_another.close()
    assert owner.alive


def test_deadlines_missed_on_the_way_leave_the_target_serving(owner: ArenaOwner) -> None:
    """A client that gives up closes its connection by force while answers are coming."""
    runs, buffer = [Run(i * MIB, MIB, i * MIB) for i in range(32)], np.zeros(32 * MIB, np.uint8)
    for turn in range(20):
        reach = UcxReach(owner.ucx_offer())
        move = reach.read if turn % 2 else reach.write
        with pytest.raises(DeadlineError):
            move(runs, buffer, lease_id=0, deadline_ns=time.monotonic_ns() + MS)
        with pytest.raises(UnavailableError, match="dead"):
            move(runs, buffer, lease_id=0, deadline_ns=soon())
        reach.close()
    assert owner.alive
    reach = UcxReach(owner.ucx_offer())
    reach.read(runs, buffer, lease_id=0, deadline_ns=soon())
    reach.close()
