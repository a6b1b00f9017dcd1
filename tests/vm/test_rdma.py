"""UCX over real verbs: what a network card serves by itself, what stays registered, and who survives whose death.

In the guest the card is Soft-RoCE (`rdma_rxe`): the kernel plays it, so a frozen process is served like one behind a real card.
"""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import DeadlineError, KvpoolError, UnavailableError
from kvpool.testing.arena_owner import ArenaOwner
from kvpool.testing.reach_kit import noise
from kvpool.tier import Arena
from kvpool.transport import Run, UcxOffer
from kvpool.transport.ucx import LIBRARY_VARIABLE, UcxReach, UcxTarget, load_ucp
from kvpool.transport.ucx.process import encode_offer
from kvpool.units import MIB, SECOND

pytestmark = pytest.mark.skipif(
    not list(Path("/dev").glob("infiniband/uverbs*")), reason="no RDMA device; `make test-vm` boots a guest that has one"
)
PATIENCE_S = 60
ARENA = 64 * MIB
RUNS = [Run(i * MIB, MIB, i * MIB) for i in range(32)]
OTHERS = "KVPOOL_TEST_UCX_LIBRARIES"  # paths of further libucp, separated by colons


def soon(within_s: float = PATIENCE_S) -> int:
    return time.monotonic_ns() + int(within_s * SECOND)


def open_reach(offer: UcxOffer) -> UcxReach:
    """A reach that must be served by the card."""
    reach = UcxReach(offer, deadline_ns=soon())
    assert reach.one_sided, reach.transports
    return reach


def resources(kind: str, pid: int) -> int:
    """How many memory regions (`mr`) or queue pairs (`qp`) the kernel holds for a process."""
    ran = subprocess.run(["rdma", "-j", "resource", "show", kind], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    return sum(entry.get("pid") == pid for entry in json.loads(ran.stdout or "[]"))


def eventually(condition: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.1)


@pytest.fixture
def owner() -> Iterator[ArenaOwner]:
    with ArenaOwner(ARENA, ucx=True) as started:
        started.mapping.view(0, ARENA)[:] = noise(ARENA, 1)
        yield started


def test_frozen_owner_is_read_and_written_all_the_same(owner: ArenaOwner) -> None:
    """One-sided is a promise about the target's CPU: it takes no part. An emulation would wait for the process."""
    reach, into = open_reach(owner.ucx_offer()), np.zeros(32 * MIB, np.uint8)
    owner.freeze()
    try:
        reach.read(RUNS, into, lease_id=0, deadline_ns=soon())
        assert np.array_equal(into, owner.mapping.view(0, into.size))
        reach.write([Run(40 * MIB + 1, MIB, 7)], into, lease_id=0, deadline_ns=soon())
        assert np.array_equal(owner.mapping.view(40 * MIB + 1, MIB), into[7 : 7 + MIB])
        small = [Run(977 * i, 3, 3 * i) for i in range(1000)]
        reach.read(small, into, lease_id=0, deadline_ns=soon())
        assert all(np.array_equal(into[run.at : run.at + 3], owner.mapping.view(run.offset, 3)) for run in small)
    finally:
        owner.thaw()
    reach.close()


def test_thousand_transfers_leave_no_registration_behind(owner: ArenaOwner) -> None:
    """Buffers come and go, often at the address of one that is gone: none stays registered, none is read to where another was."""
    reach, mine = open_reach(owner.ucx_offer()), os.getpid()
    chance, counts, theirs = random.Random(1), [], resources("mr", owner.pid)
    for turn in range(1000):
        length = chance.choice((1000, 65_537, 300_000, MIB))
        offset = chance.randrange(32 * MIB)
        into = np.zeros(length, np.uint8)
        reach.read([Run(offset, length, 0)], into, lease_id=0, deadline_ns=soon())
        assert np.array_equal(into, owner.mapping.view(offset, length)), turn
        if turn % 10 == 0:
            reach.write([Run(40 * MIB, length, 0)], into, lease_id=0, deadline_ns=soon())
            assert np.array_equal(owner.mapping.view(40 * MIB, length), into), turn
        if turn % 100 == 99:
            counts.append(resources("mr", mine))
    assert max(counts) <= counts[0] + 8, counts
    assert resources("mr", owner.pid) == theirs
    reach.close()
    assert (resources("mr", mine), resources("qp", mine)) == (0, 0)


CLIENT = """
import sys, time
import numpy as np
from kvpool.transport import Run
from kvpool.transport.ucx import UcxReach
from kvpool.transport.ucx.process import decode_offer
reach = UcxReach(decode_offer(sys.argv[1]), deadline_ns=time.monotonic_ns() + 60 * 10**9)
assert reach.one_sided
buffer, runs = np.full(32 << 20, 77, np.uint8), [Run(i << 20, 1 << 20, i << 20) for i in range(32)]
move = reach.read if sys.argv[2] == "read" else reach.write
print("up", flush=True)
while True:
    move(runs, buffer, lease_id=0, deadline_ns=time.monotonic_ns() + 60 * 10**9)
"""


@pytest.mark.parametrize("what", ["read", "write"])
def test_clients_killed_on_the_way_leave_the_target_as_it_was(owner: ArenaOwner, what: str) -> None:
    """The target serves on, writes nobody else's bytes, and lets go of what it held for the dead."""
    before = owner.mapping.view(32 * MIB, 32 * MIB).copy()
    held = resources("qp", owner.pid)
    for turn in range(3):
        command = [sys.executable, "-c", CLIENT, encode_offer(owner.ucx_offer()), what]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == b"up\n"
            time.sleep(0.05 * turn)
            client.kill()
    reach, into = open_reach(owner.ucx_offer()), np.zeros(32 * MIB, np.uint8)
    reach.read([Run(32 * MIB, 32 * MIB, 0)], into, lease_id=0, deadline_ns=soon())
    assert np.array_equal(into, before)
    reach.close()
    assert owner.alive
    eventually(lambda: resources("qp", owner.pid) <= held, "the queue pairs of dead clients are gone", 180)


def test_owner_killed_on_the_way_is_an_error_by_the_deadline() -> None:
    """At any moment of a transfer: neither a hang nor an abort of the client, which goes on with the next node."""
    for turn in range(4):
        with ArenaOwner(ARENA, ucx=True) as owner:
            reach, buffer = open_reach(owner.ucx_offer()), np.zeros(32 * MIB, np.uint8)
            caught: list[BaseException] = []
            thread = threading.Thread(
                target=move_until_it_fails, args=(reach.write if turn % 2 else reach.read, buffer, caught), daemon=True
            )
            thread.start()
            time.sleep(0.1 + 0.17 * turn)
            owner.kill()
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
            assert isinstance(caught[0], UnavailableError | DeadlineError)
            with pytest.raises(UnavailableError, match="dead"):
                reach.read(RUNS, buffer, lease_id=0, deadline_ns=soon())
            reach.close()
    assert (resources("mr", os.getpid()), resources("qp", os.getpid())) == (0, 0)


def move_until_it_fails(move: Callable[..., None], buffer: np.ndarray, caught: list[BaseException]) -> None:
    try:
        while True:
            move(RUNS, buffer, lease_id=0, deadline_ns=soon(PATIENCE_S / 2))
    except KvpoolError as error:
        caught.append(error)


def test_deadlines_missed_on_the_way_cost_nobody_anything_else(owner: ArenaOwner) -> None:
    """The transfer is ended by force: nothing lands in the buffer afterwards, and both sides go on."""
    buffer = np.zeros(32 * MIB, np.uint8)
    for turn in range(6):
        reach = open_reach(owner.ucx_offer())
        with pytest.raises(DeadlineError, match="before the bytes had moved"):
            (reach.write if turn % 2 else reach.read)(RUNS, buffer, lease_id=0, deadline_ns=soon(0.02))
        buffer[:] = 9
        time.sleep(0.1)
        assert bool((buffer == 9).all())
        reach.close()
    reach = open_reach(owner.ucx_offer())
    reach.read(RUNS, buffer, lease_id=0, deadline_ns=soon())
    reach.close()
    assert owner.alive


def test_key_of_another_life_of_the_node_is_refused_by_its_card(owner: ArenaOwner) -> None:
    """What opened the arena of a former process opens nothing of the next one; both processes survive the attempt."""
    with ArenaOwner(ARENA, ucx=True) as former:
        stale = former.ucx_offer()
    now = owner.ucx_offer()
    mixed = UcxOffer(worker_address=now.worker_address, rkey=stale.rkey, base_address=now.base_address, length=now.length)
    with pytest.raises((UnavailableError, DeadlineError)):
        UcxReach(mixed, deadline_ns=soon(20))
    reach, into = open_reach(now), np.zeros(8, np.uint8)
    reach.read([Run(0, 8, 0)], into, lease_id=0, deadline_ns=soon())
    assert np.array_equal(into, owner.mapping.view(0, 8))
    reach.close()


@pytest.mark.parametrize("library", os.environ.get(OTHERS, "").split(":"))
@pytest.mark.parametrize("ours", ["client", "node"])
def test_two_versions_of_ucx_understand_each_other_or_say_so(library: str, ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster is not upgraded at once: whatever the two agree on is right, and what they don't is an error by the deadline."""
    if not library:
        pytest.skip(f"no other UCX is named in {OTHERS}")
    here = load_ucp().path
    monkeypatch.setenv(LIBRARY_VARIABLE, here if ours == "node" else library)
    with ArenaOwner(ARENA, ucx=True) as owner:
        owner.mapping.view(0, ARENA)[:] = noise(ARENA, 2)
        ran = subprocess.run(
            [sys.executable, "-c", READER, encode_offer(owner.ucx_offer())],
            env={**os.environ, LIBRARY_VARIABLE: library if ours == "node" else here},
            capture_output=True, text=True, timeout=PATIENCE_S * 2, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        said = json.loads(ran.stdout)
        expected = int(owner.mapping.view(5 * MIB, MIB).astype(np.uint64).sum())
        assert said["error"] in ("UnavailableError", "DeadlineError") or said["sum"] == expected, said
        print(f"{ours} {here}, the other {library}: {said}")
        assert owner.alive


READER = """
import json, sys, time
import numpy as np
from kvpool.errors import KvpoolError
from kvpool.transport import Run
from kvpool.transport.ucx import UcxReach
from kvpool.transport.ucx.process import decode_offer
said = {"sum": 0, "error": "", "transports": []}
try:
    reach, into = UcxReach(decode_offer(sys.argv[1]), deadline_ns=time.monotonic_ns() + 30 * 10**9), np.zeros(1 << 20, np.uint8)
    reach.read([Run(5 << 20, 1 << 20, 0)], into, lease_id=0, deadline_ns=time.monotonic_ns() + 30 * 10**9)
    said |= {"sum": int(into.astype(np.uint64).sum()), "transports": reach.transports}
    reach.close()
except KvpoolError as error:
    said["error"] = type(error).__name__
print(json.dumps(said))
"""


def test_arena_on_a_memory_device_is_served_by_the_card() -> None:
    """Both kinds of hardware at once: one-sided reads and writes of an arena that lies on `/dev/dax*`."""
    devices = sorted(Path("/dev").glob("dax*"))
    if not devices:
        pytest.skip("no memory device /dev/dax*")
    with Arena.on(devices[0], "da" * 16, 1, ARENA) as arena:
        arena.data[:] = noise(ARENA, 3)
        target = UcxTarget(arena.data)
        reach, into = open_reach(target.offer), np.zeros(MIB, np.uint8)
        reach.read([Run(3 * MIB + 1, MIB, 0)], into, lease_id=0, deadline_ns=soon())
        assert np.array_equal(into, arena.view(3 * MIB + 1, MIB))
        reach.write([Run(9 * MIB, MIB, 0)], into, lease_id=0, deadline_ns=soon())
        assert np.array_equal(into, arena.view(9 * MIB, MIB))
        reach.close()
        target.close()
