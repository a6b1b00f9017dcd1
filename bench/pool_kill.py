"""What a reader of a node sees when that node is killed as by `kill -9` in the middle of a batch of 32 x 1 MiB.

Alone, the call that is under way must end soon, with fewer blocks. With a second copy it must end with all of them.
"""

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple, Self

import numpy as np

from kvpool.block import BlockKey, Namespace
from kvpool.cli.bench.local import LocalNode
from kvpool.cli.bench.space import BLOCK_TOKENS, Rows, chain_of, space_of, stamp, stamped, wipe
from kvpool.client import AsyncPoolClient
from kvpool.errors import UnavailableError
from kvpool.units import MIB, SECOND

BLOCKS = 32
_BEFORE_S = 0.5
_AFTER_S = 1.5


class Call(NamedTuple):
    """One get: when (monotonic seconds), how many blocks came, and whether they were right."""

    start: float
    end: float
    blocks: int
    right: bool


class _Client:
    """As a worker: the client of an event loop, which here runs only while it is asked."""

    def __init__(self, source: str, space: Namespace, reach: str, copies: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._pool = self._loop.run_until_complete(AsyncPoolClient.open(source, space, transport=reach, copies=copies))

    def put(self, chain: Sequence[BlockKey], rows: Rows) -> None:
        """Store a chain."""

        def fill(index: int, payload: Rows) -> None:
            payload[:] = rows[index]

        counts = [BLOCK_TOKENS] * len(chain)
        held = self._loop.run_until_complete(self._pool.store(chain, 0, counts, fill, deadline_ns=_deadline_ns()))
        if held != len(chain) or self._pool.under_replicated:
            raise UnavailableError(f"only {held} of {len(chain)} blocks were stored, {self._pool.under_replicated} copies are missing")

    def get(self, chain: Sequence[BlockKey], rows: Rows) -> int:
        """Read its leading blocks; how many."""
        return self._loop.run_until_complete(self._pool.load_into(chain, 0, list(rows), deadline_ns=_deadline_ns()))

    def close(self) -> None:
        """Disconnect."""
        self._loop.run_until_complete(self._pool.close())
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _deadline_ns() -> int:
    return time.monotonic_ns() + 10 * SECOND


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
        client = stack.enter_context(_Client(",".join(node.address for node in pool), space, reach, nodes))
        chain, rows = chain_of(space, 0, BLOCKS), np.ones((BLOCKS, MIB), np.uint8)
        client.put(chain, stamp(rows, 0))
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
            got = client.get(chain, rows)
            calls.append(Call(start, time.monotonic(), got, stamped(rows[:got], 0)))
        timer.join()
        return killed[0], calls
