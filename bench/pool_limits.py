"""Contestants of `bench.pool` that are yardsticks: `memcpy` by one thread, and `tcp`, plain sockets between two processes."""

import sys

import numpy as np

from bench.peers.turns import BATCH, LARGE, SMALL, SMALL_KEYS, WORKING_SETS, Case, take_turns
from kvpool.cli.bench import limits

ARENA = WORKING_SETS * BATCH * LARGE


def make_cases(one: limits.Memcpy | limits.RawTcp) -> dict[str, Case]:
    """The cases that a yardstick knows: the same buffers as a store's, without a store."""
    batch = np.ones((BATCH, LARGE), np.uint8)
    large, small = batch[:1], batch[:1, :SMALL]

    def batch_at(i: int) -> int:
        return i % WORKING_SETS * BATCH * LARGE

    return {
        "get_64k": Case(lambda i: one.read(small, i % SMALL_KEYS * SMALL), SMALL),
        "get_1m": Case(lambda i: one.read(large, i % (WORKING_SETS * BATCH) * LARGE), LARGE),
        "get_32x1m": Case(lambda i: one.read(batch, batch_at(i)), BATCH * LARGE),
        "put_64k": Case(lambda i: one.write(small, i % SMALL_KEYS * SMALL), SMALL),
        "put_32x1m": Case(lambda i: one.write(batch, batch_at(i)), BATCH * LARGE),
    }


def main(kind: str) -> None:
    if kind == "memcpy":
        with limits.memcpy(ARENA) as copying:
            take_turns("memcpy", np.__version__, make_cases(copying))
    else:
        with limits.raw_tcp(ARENA) as raw:
            take_turns("raw tcp", "", make_cases(raw), [raw.pid])


if __name__ == "__main__":
    main(sys.argv[1])
