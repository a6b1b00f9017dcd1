"""One whole local cluster with the real model for the tests of this folder; each leaves it serving and balanced."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvpool.cli.demo import reference_answers
from kvpool.cli.procs import ClusterOptions
from kvpool.cli.supervisor import LocalCluster
from kvpool.request.pool import NodeDescription
from kvpool.units import MIB
from kvpool.wire.pool_client import PoolRpc

MODEL = "smollm2"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/e2e" in str(item.path):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """1 node, 1 prefill worker, 1 decode worker, 1 router; processes that die are restarted."""
    with LocalCluster(ClusterOptions(model=MODEL, port=0, capacity_bytes=512 * MIB, request_timeout_s=90)) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="session")
def truth() -> Callable[[Sequence[Sequence[int]], int], list[list[int]]]:
    """Greedy answers of plain `transformers` in one process, asked for all prompts at once, remembered."""
    known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def answers(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        missing = [tuple(p) for p in dict.fromkeys(map(tuple, prompts)) if (tuple(p), max_tokens) not in known]
        if missing:
            for prompt, answer in zip(missing, reference_answers(missing, model=MODEL, max_tokens=max_tokens), strict=True):
                known[prompt, max_tokens] = answer
        return [known[tuple(p), max_tokens] for p in prompts]

    return answers


async def _describe(address: str) -> NodeDescription:
    rpc = PoolRpc(address)
    try:
        return await rpc.describe(5)
    finally:
        await rpc.close()


@pytest.fixture
def books_balance(cluster: LocalCluster) -> Callable[[], NodeDescription]:
    """Wait until no lease is left on the node; at every look `free + used + pinned == capacity`."""

    def balanced() -> NodeDescription:
        cluster.wait_ready()
        end = time.monotonic() + 60
        while True:
            (member,) = cluster.membership.members("node")
            books = asyncio.run(_describe(member.address))
            assert books.free_bytes + books.used_bytes + books.pinned_bytes == books.capacity_bytes
            if not (books.read_leases or books.write_leases or books.pinned_bytes):
                return books
            assert time.monotonic() < end, f"leases don't go back: {books}"
            time.sleep(0.05)

    return balanced
