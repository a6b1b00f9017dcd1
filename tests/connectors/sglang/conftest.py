from collections.abc import Iterator

import pytest

from kvpool.testing import sglang_twin
from kvpool.testing.node_process import NodeProcess

sglang_twin.install()


@pytest.fixture(scope="session")
def pool() -> Iterator[str]:
    """Addresses of three nodes that the tests of this folder share; each uses a model name of its own."""
    nodes = [NodeProcess("--capacity", "32MiB") for _ in range(3)]
    yield ",".join(one.address for one in nodes)
    for one in nodes:
        assert one.stop() == 0, "".join(one.log)
