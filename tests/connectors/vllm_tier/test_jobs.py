"""Jobs of the vLLM tier on a real node: begun without waiting, asked about later."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvpool.client.values import ValueClient
from kvpool.connectors.vllm_tier.jobs import Finished, Jobs
from kvpool.errors import ClosedError
from kvpool.testing.node_process import NodeProcess

CHUNK = 5000
KEYS = [i.to_bytes(36, "big") for i in range(8)]


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    """A node for all tests here; each has a scope of its own."""
    process = NodeProcess("--capacity", "16MiB")
    yield process
    assert process.stop() == 0, "".join(process.log)


@pytest.fixture
def rows() -> Any:
    """Sixteen chunks of host memory."""
    return np.random.default_rng(5).integers(0, 256, (16, CHUNK), dtype=np.uint8)


def jobs_of(client: Any, rows: Any) -> Jobs:
    return Jobs(client, rows, load_threads=2, store_threads=1)


def ended(jobs: Jobs) -> list[tuple[int, bool, list[bool]]]:
    """What has ended, in order of the jobs' numbers."""
    jobs.drain()
    return sorted((done.job_id, done.load, list(done.good)) for done in jobs.finished())


def test_stored_chunks_are_loaded_into_other_chunks(node: NodeProcess, rows: Any) -> None:
    """A job says for each key whether it went well, so that what came of a load that wasn't whole can be kept."""
    with ValueClient(node.address, scope=["stored"]) as client:
        jobs = jobs_of(client, rows)
        jobs.store(1, KEYS[:4], [0, 1, 2, 3])
        assert ended(jobs) == [(1, False, [True] * 4)]
        jobs.load(2, [KEYS[3], KEYS[6], KEYS[0]], [8, 9, 10])
        jobs.load(3, [KEYS[1]], [15])
        assert ended(jobs) == [(2, True, [True, False, True]), (3, True, [True])]
        assert [np.array_equal(rows[a], rows[b]) for a, b in ((3, 8), (0, 10), (1, 15))] == [True] * 3
        assert jobs.finished() == []
        jobs.close()


def test_loads_don_t_wait_for_stores(rows: Any) -> None:
    """A request waits for a load, nobody for a store."""
    gate = threading.Event()

    class Slow:
        """A pool whose puts wait."""

        def put(self, keys: list[bytes], given: Any, *, ttl_s: float) -> list[bool]:
            gate.wait(60)
            return [True] * len(keys)

        def get(self, keys: list[bytes], outs: Any) -> list[bool]:
            return [True] * len(keys)

    jobs = jobs_of(Slow(), rows)
    for number in range(3):
        jobs.store(number, KEYS[:1], [0])
    jobs.load(7, KEYS[:1], [1])
    found: list[Finished] = []
    while not found:
        found = jobs.finished()
    assert [done.job_id for done in found] == [7]
    gate.set()
    assert [number for number, _, _ in ended(jobs)] == [0, 1, 2]
    jobs.close()


def test_job_that_raises_has_failed(node: NodeProcess, rows: Any) -> None:
    """A job that is never told about would keep its chunks for ever."""
    client = ValueClient(node.address, scope=["raises"])
    jobs = jobs_of(client, rows)
    client.close()
    jobs.load(1, KEYS[:2], [0, 1])
    assert ended(jobs) == [(1, True, [False, False])]
    jobs.close()
    with pytest.raises(ClosedError):
        jobs.store(2, KEYS[:1], [0])
