"""Redis by redis-py with hiredis: GET and SET, MGET and a pipeline for batches, a pipeline of EXISTS for the probe.

Its answers are new `bytes`, which a caller would copy into place; that copy is not counted.
"""

import importlib
from typing import Any

from bench.peers.resp import resp_server
from bench.peers.turns import BATCH, LARGE, MIB, PROBED, SMALL, SMALL_KEYS, WORKING_SETS, Case, Memory, check, take_turns


def main() -> None:
    with resp_server() as (pid, port):
        client = importlib.import_module("redis").Redis("127.0.0.1", port, socket_read_size=MIB)
        told = client.info()
        name = "valkey" if "valkey_version" in told else "redis"
        take_turns("redis", f"{name} {told[f'{name}_version']}", make_cases(client), [pid])


def make_cases(client: Any) -> dict[str, Case]:
    memory = Memory(LARGE)
    large, small = bytes(memory.view), bytes(memory.view[:SMALL])
    sets = [[f"L{one}-{index}" for index in range(BATCH)] for one in range(WORKING_SETS)]
    for keys in sets:
        for key in keys:
            client.set(key, large)
    for index in range(SMALL_KEYS):
        client.set(f"S{index}", small)
    for index in range(PROBED):
        client.set(f"P{index}", b"x" * 256)
    stored: list[str] = []

    def put_small(i: int) -> None:
        stored.append(f"put{i}")
        client.set(stored[-1], small)

    def put_batch(i: int) -> None:
        pipe = client.pipeline(transaction=False)
        for index in range(BATCH):
            stored.append(f"put{i}-{index}")
            pipe.set(stored[-1], large)
        check(all(pipe.execute()), i)

    def forget() -> None:
        client.delete(*stored)
        stored.clear()

    def probe(i: int) -> None:
        pipe = client.pipeline(transaction=False)
        for index in range(PROBED):
            pipe.exists(f"P{index}")
        check(sum(pipe.execute()) == PROBED, i)

    return {
        "get_64k": Case(lambda i: check(len(client.get(f"S{i % SMALL_KEYS}")) == SMALL, i), SMALL),
        "get_1m": Case(lambda i: check(len(client.get(sets[i // BATCH % WORKING_SETS][i % BATCH])) == LARGE, i), LARGE),
        "get_32x1m": Case(lambda i: check(len(client.mget(sets[i % WORKING_SETS])[-1]) == LARGE, i), BATCH * LARGE),
        "put_64k": Case(put_small, SMALL, forget),
        "put_32x1m": Case(put_batch, BATCH * LARGE, forget),
        "probe512": Case(probe),
    }


if __name__ == "__main__":
    main()
