import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from kvpool.block import Geometry, LayerSpec, Namespace
from kvpool.testing.node_process import NodeProcess
from kvpool.testing.pool_cluster import PoolCluster

_numbers = itertools.count()


@pytest.fixture(scope="session")
def node() -> Iterator[NodeProcess]:
    """A node that the tests of this folder share; each uses a namespace of its own."""
    process = NodeProcess("--capacity", "64MiB")
    yield process
    assert process.stop() == 0, "".join(process.log)


@pytest.fixture
def start_node() -> Iterator[Callable[..., NodeProcess]]:
    """Start nodes that this test may kill."""
    started: list[NodeProcess] = []

    def start(*flags: str) -> NodeProcess:
        started.append(NodeProcess("--capacity", "16MiB", *flags))
        return started[-1]

    yield start
    for process in started:
        process.stop()


@pytest.fixture
def namespace() -> Namespace:
    """A small model, other than that of every other test: 512 bytes a token, blocks of 16."""
    geometry = Geometry(tuple(LayerSpec("full", 2, 16, 16) for _ in range(2)), 16, "float32")
    return Namespace(model=f"test-{next(_numbers)}", revision="1", weights_digest=bytes(32), geometry=geometry, rope="none")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[PoolCluster]:
    """No nodes yet, behind relays that freeze, cut and mend."""
    made = PoolCluster(tmp_path)
    yield made
    await made.stop()
