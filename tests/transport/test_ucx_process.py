"""The serving process: replaced when it dies, gone when its parent is."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import ConfigError, UnavailableError
from kvpool.tier import Arena
from kvpool.transport import Run, UcxOffer
from kvpool.transport.ucx import LIBRARY_VARIABLE, UcxReach, UcxTargetProcess
from kvpool.transport.ucx.process import decode_offer, encode_offer
from kvpool.units import MIB, SECOND

PATIENCE_S = 60


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Whether the process has ended (a zombie that nobody has waited for counts)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def read_byte(offer: UcxOffer | None, offset: int) -> int:
    assert offer is not None
    reach, into = UcxReach(offer), np.zeros(1, np.uint8)
    reach.read([Run(offset, 1, 0)], into, lease_id=0, deadline_ns=time.monotonic_ns() + PATIENCE_S * SECOND)
    reach.close()
    return int(into[0])


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with Arena.create(tmp_path, uuid.uuid4().hex, 1, 3 * MIB + 11) as created:
        yield created


def serve(arena: Arena) -> UcxTargetProcess:
    return UcxTargetProcess(arena.path, arena.superblock.data_offset, arena.capacity)


def test_arena_is_served_by_another_process_until_closed(arena: Arena) -> None:
    """The last byte too; and after close there is no offer and no process."""
    arena.data[-1] = 77
    target = serve(arena)
    assert read_byte(target.offer, arena.capacity - 1) == 77
    pid = target.pid
    assert pid != os.getpid()
    target.close()
    target.close()
    assert target.offer is None
    assert gone(pid)


def test_killed_process_is_replaced_and_offers_anew(arena: Arena) -> None:
    """The node lives on without a data plane for a moment, then with a new one; the old offer leads nowhere."""
    arena.data[5] = 55
    target = serve(arena)
    old, pid = target.offer, target.pid
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: target.restarts == 1 and target.offer is not None, "another process serves")
    assert target.pid != pid
    assert read_byte(target.offer, 5) == 55
    assert old is not None
    with pytest.raises(UnavailableError):
        UcxReach(old)
    target.close()


def test_terminal_signals_do_not_end_it_before_the_node_does(arena: Arena) -> None:
    """Ctrl-C goes to the whole group, but transfers under way may finish while the node shuts down."""
    target = serve(arena)
    os.kill(target.pid, signal.SIGINT)
    os.kill(target.pid, signal.SIGTERM)
    assert read_byte(target.offer, 0) == 0
    assert target.restarts == 0
    target.close()


PARENT = """
import sys, time
from kvpool.transport.ucx import UcxTargetProcess
target = UcxTargetProcess(sys.argv[1], 4096, 1 << 20)
print(target.pid, flush=True)
if sys.argv[2] == "hang":
    time.sleep(600)
"""


@pytest.mark.parametrize("end", ["hang", "exit"])
def test_parent_ends_without_closing_and_the_process_ends_too(arena: Arena, end: str) -> None:
    """Neither `kill -9` of a node nor a forgotten close leaves a process that serves memory nobody owns."""
    with subprocess.Popen([sys.executable, "-c", PARENT, str(arena.path), end], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if end == "hang":
            parent.kill()
        parent.wait(PATIENCE_S)
    eventually(lambda: gone(pid), "the serving process has ended")


def test_arena_that_cannot_be_served_refused_at_once(tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is asked to offer UCX and can't says so at start, not by being slow later."""
    with pytest.raises(ConfigError, match="leave ucx out of the offers"):
        UcxTargetProcess(tmp_path / "missing", 4096, MIB)
    monkeypatch.setenv(LIBRARY_VARIABLE, "/no/such/libucp.so.0")
    with pytest.raises(ConfigError, match="exit code 1"):
        serve(arena)


def test_offer_survives_its_line() -> None:
    """What the child prints is what the node offers."""
    offer = UcxOffer(worker_address=bytes(range(256)), rkey=b"\0\xff", base_address=(1 << 64) - 1, length=1 << 50)
    assert decode_offer(encode_offer(offer)) == offer
