"""A child that is looked after: its offer, its end, its silence."""

import os
import signal
import sys
import time
from collections.abc import Callable

import pytest

from kvpool.errors import ConfigError
from kvpool.transport.nurse import NursedProcess

CHILD = """
import os, select, sys
print("offer", os.getpid(), flush=True)
while not select.select([sys.stdin], [], [], 0.05)[0]:
    os.write(1, b".")
"""


def nursed(code: str = CHILD, silence_s: float | None = 60.0) -> NursedProcess[int]:
    return NursedProcess(
        [sys.executable, "-c", code], lambda line: int(line.split()[1]), name="TEST", hint="leave it out", silence_s=silence_s
    )


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"not within 60 s: {what}"
        time.sleep(0.01)


def test_offer_is_what_the_child_says_and_ends_with_it() -> None:
    """None while nobody serves."""
    child = nursed()
    assert child.offer == child.pid
    child.close()
    child.close()
    assert child.offer is None


def test_child_that_dies_is_replaced() -> None:
    """With another offer."""
    child = nursed()
    first = child.pid
    os.kill(first, signal.SIGKILL)
    eventually(lambda: child.restarts == 1 and child.offer not in (None, first), "another child serves")
    child.close()


def test_child_that_falls_silent_is_killed_and_replaced() -> None:
    """It must not wake up later and go on where it stood."""
    child = nursed(silence_s=2.0)
    first = child.pid
    os.kill(first, signal.SIGSTOP)
    eventually(lambda: child.restarts == 1 and child.offer not in (None, first), "another child serves")
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    child.close()


def test_child_that_never_serves_is_an_error_that_says_what_to_do() -> None:
    """At once, not by being slow later."""
    with pytest.raises(ConfigError, match="exit code 3, see above"):
        nursed("raise SystemExit(3)")
