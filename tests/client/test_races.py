"""Reads by the board while other processes put and the node evicts, moves and reuses all it has: no wrong byte, ever.

The proof of the test is a reader that doesn't look at generations afterwards: it must be caught.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpool
from kvpool.block import BlockKey
from kvpool.client import Client
from kvpool.client.here import Limits
from kvpool.testing.node_process import NodeProcess
from kvpool.tier.board import BoardReader, Found
from kvpool.units import SECOND
from tests.client.racing_writer import SIZES, keys_of, namespace_of, word_of

WRITER = Path(__file__).with_name("racing_writer.py")
READS = 10_000
"""Blocks that must have been read whole, by each way."""
LONGEST_S = 120


@pytest.fixture
def race(start_node: Callable[..., NodeProcess]) -> Iterator[list[Client]]:
    """Clients of both sizes of blocks, of a node that two other processes overwrite all the time."""
    node = start_node("--capacity", "16MiB")
    writers = [subprocess.Popen([sys.executable, str(WRITER), node.address, str(i)], stdout=subprocess.PIPE) for i in (1, 2)]
    pools = [kvpool.connect(node.address, namespace=namespace_of(nbytes)) for nbytes in SIZES]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
        for pool in pools:
            assert pool._run(pool._client.pool.connect()) == []
        yield pools
        assert [writer.poll() for writer in writers] == [None, None]
    finally:
        for pool in pools:
            pool.close()
        for writer in writers:
            writer.kill()
            writer.communicate()


class Tally:
    """What readers saw."""

    def __init__(self) -> None:
        self.right = self.wrong = 0

    def add(self, payload: np.ndarray, key: BlockKey) -> None:
        """One block that was delivered."""
        if (payload.reshape(-1).view(np.uint64) == word_of(key)).all():
            self.right += 1
        else:
            self.wrong += 1


def copy(pool: Client, keys: list[BlockKey], tally: Tally) -> None:
    """Several blocks at once, and one alone."""
    here, nbytes = pool._client.pool._core.here, pool._geometry.payload_bytes(16)
    rows = np.empty((len(keys), nbytes), np.uint8)
    for some in (keys, keys[:1]):
        got = here.read(some, [16] * len(some), rows, Limits(time.monotonic_ns() + SECOND))
        for j, came in enumerate(got):
            if came:
                tally.add(rows[j], some[j])


def look(pool: Client, keys: list[BlockKey], tally: Tally) -> None:
    """In place, under a hold: right at the first look and at the last."""

    def sink(j: int, payload: Any) -> None:
        tally.add(payload, keys[j])
        time.sleep(0.002)
        tally.add(payload, keys[j])

    pool._client.pool._core.here.deliver(keys, [16] * len(keys), sink, Limits(time.monotonic_ns() + SECOND))


def view(pool: Client, keys: list[BlockKey], tally: Tally) -> None:
    """As arrays."""
    with pool.view_blocks(keys) as shown:
        for key, array in zip(keys, shown.blocks, strict=False):
            tally.add(np.ascontiguousarray(array), key)
        time.sleep(0.002)
        for key, array in zip(keys, shown.blocks, strict=False):
            tally.add(np.ascontiguousarray(array), key)


def run(pools: list[Client], way: Callable[[Client, list[BlockKey], Tally], None], over: Callable[[Tally], bool]) -> Tally:
    """Read what is on the board at random until it is `over`, by two threads a client."""
    tally, end = Tally(), time.monotonic() + LONGEST_S
    failed: list[BaseException] = []

    def work(pool: Client, seed: int) -> None:
        dice, keys = np.random.default_rng(seed), keys_of(pool._client.pool.namespace)
        try:
            while not over(tally) and not failed and time.monotonic() < end:
                present = np.flatnonzero(pool._client.pool._core.here.present(keys))
                if present.size:
                    way(pool, [keys[i] for i in dice.choice(present, min(4, present.size), replace=False)], tally)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(pool, seed)) for seed, pool in enumerate(pools * 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    return tally


@pytest.mark.parametrize("way", [copy, look, view])
def test_no_read_ever_delivers_a_wrong_byte(race: list[Client], way: Callable[[Client, list[BlockKey], Tally], None]) -> None:
    """Whatever is evicted, moved or overwritten meanwhile."""
    tally = run(race, way, lambda tally: tally.right >= READS or tally.wrong > 0)
    assert tally.wrong == 0
    assert tally.right >= READS


class Blind(BoardReader):
    """A reader that never looks again."""

    def unchanged(self, found: Found, start: int, stop: int) -> bool:
        """As if nothing ever changed."""
        return True

    def still(self, place: Any) -> bool:
        """As if nothing ever changed."""
        return True


def test_reader_that_does_not_look_at_generations_again_is_caught(race: list[Client], monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test above would prove nothing."""
    for pool in race:
        (reach,) = pool._client.pool._core.links.locals
        assert reach.board is not None
        reach.board.__class__ = Blind
    tally = run(race, copy, lambda tally: tally.wrong > 0)
    assert tally.wrong > 0
