"""Processes that end without closing anything end well: no crash, no hang, nothing on standard error."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvpool.testing.arena_owner import ArenaOwner
from kvpool.transport.ucx.process import encode_offer
from kvpool.units import MIB

HEAD = """
import os, sys, threading, time
import numpy as np
from kvpool.transport import Run
from kvpool.transport.ucx import UcxReach, UcxTarget
from kvpool.transport.ucx.process import decode_offer
offer, into = decode_offer(sys.argv[1]), np.zeros(16 << 20, np.uint8)
def read(reach, length=1 << 20):
    reach.read([Run(0, length, 0)], into, lease_id=0, deadline_ns=time.monotonic_ns() + 10**11)
"""

ENDINGS = {
    "open reach": "reach = UcxReach(offer); read(reach)",
    "open reach in a cycle": "reach = UcxReach(offer); reach.me = reach; read(reach); del reach",
    "own target and a reach to it": "target = UcxTarget(np.zeros(64, np.uint8)); reach = UcxReach(target.offer)",
    "an exception": "reach = UcxReach(offer); read(reach); import atexit; atexit.register(lambda: None); sys.exit(0)",
    "a thread that reads for ever": """
reach = UcxReach(offer)
def forever():
    while True: read(reach, 16 << 20)
threading.Thread(target=forever, daemon=True).start()
threading.excepthook = lambda arguments: None
time.sleep(0.2)""",
    "a forked child that exits": """
reach = UcxReach(offer); target = UcxTarget(np.zeros(64, np.uint8)); read(reach)
child = os.fork()
if child == 0: sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
read(reach)""",
}


@pytest.fixture(scope="module")
def owner() -> Iterator[ArenaOwner]:
    with ArenaOwner(16 * MIB, ucx=True) as started:
        yield started


@pytest.mark.parametrize("ending", list(ENDINGS))
def test_process_that_ends_without_closing_ends_cleanly(owner: ArenaOwner, ending: str) -> None:
    """UCX has threads, descriptors and destructors of its own; the interpreter must end before none of them is in use."""
    command = [sys.executable, "-c", HEAD + ENDINGS[ending], encode_offer(owner.ucx_offer())]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_process_that_ends_while_a_thread_waits_for_a_hanging_node_ends_cleanly(owner: ArenaOwner) -> None:
    """A daemon thread inside a read of a frozen node must not keep the interpreter from ending."""
    code = HEAD + (
        "reach = UcxReach(offer)\n"
        "print('up', flush=True); sys.stdin.read(1)\n"
        "threading.excepthook = lambda arguments: None\n"
        "threading.Thread(target=read, args=(reach,), daemon=True).start()\n"
        "time.sleep(0.2)\n"
    )
    command = [sys.executable, "-c", code, encode_offer(owner.ucx_offer())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "up\n"
        owner.freeze()
        try:
            _, errors = client.communicate("x", timeout=60)
        finally:
            owner.thaw()
            client.kill()
    assert (client.returncode, errors) == (0, "")
