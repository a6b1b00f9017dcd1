"""What a reader of a node sees when that node is killed as by `kill -9` in the middle of a batch of 32 x 1 MiB.

Alone, the call that is under way must end soon, with fewer blocks. With a second copy it must end with all of them.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from kvpool.cli.bench.caller import Caller
from kvpool.cli.bench.local import LocalNode
from kvpool.cli.bench.space import chain_of, space_of, stamp, stamped, wipe
from kvpool.units import MIB

BLOCKS = 32
_BEFORE_S = 0.5
_AFTER_S = 1.5


class Call(NamedTuple):
    """One get: when (monotonic seconds), how many blocks came, and whether they were right."""

    start: float
    end: float
    blocks: int
    right: bool


def measure(reach: str) -> dict[str, object]:
    """The figures, by `reach`. With two copies each of the two nodes is killed once."""
    killed, calls = _calls(reach, nodes=1, victim=0)
    hit = next(call for call in calls if call.end > killed and call.blocks < BLOCKS)
    found: dict[str, object] = {
        f"kill_{reach}_ms": 1e3 * (hit.end - max(hit.start, killed)),
        f"kill_{reach}_blocks": hit.blocks,
        f"kill_{reach}_slowest_later_ms": 1e3 * max(call.end - call.start for call in calls if call.start > hit.end),
    }
    both = [_calls(reach, nodes=2, victim=victim) for victim in range(2)]
    after = [call for killed, calls in both for call in calls if call.end > killed]
    found["kill_replica_ok"] = all(call.blocks == BLOCKS for call in after)
    found["kill_replica_slowest_ms"] = 1e3 * max(call.end - call.start for call in after)
    found["kill_wrong"] = sum(not call.right for _, calls in ((killed, calls), *both) for call in calls)
    return found


def _calls(reach: str, nodes: int, victim: int) -> tuple[float, Sequence[Call]]:
    """When the victim was killed, and the calls before and after."""
    with ExitStack() as stack:
        pool = [stack.enter_context(LocalNode(256 * MIB)) for _ in range(nodes)]
        space = space_of(MIB)
        caller = stack.enter_context(Caller(",".join(node.address for node in pool), space, reach, copies=nodes))
        chain, rows = chain_of(space, 0, BLOCKS), np.ones((BLOCKS, MIB), np.uint8)
        caller.put(chain, stamp(rows, 0))
        killed: list[float] = []

        def kill() -> None:
            killed.append(time.monotonic())
            pool[victim].kill()

        timer = threading.Timer(_BEFORE_S, kill)
        timer.start()
        calls: list[Call] = []
        while not killed or time.monotonic() < killed[0] + _AFTER_S:
            wipe(rows)
            start = time.monotonic()
            got = caller.get(chain, rows)
            calls.append(Call(start, time.monotonic(), got, stamped(rows[:got], 0)))
        timer.join()
        return killed[0], calls
