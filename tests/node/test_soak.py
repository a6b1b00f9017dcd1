"""A few seconds of the soak, so that the long one can be trusted to start."""

import asyncio

from kvpool.testing.node_process import NodeProcess
from kvpool.testing.soak import CLIENTS, soak

SECONDS = 6.0


def test_full_node_under_mixed_work_keeps_its_books_and_gives_everything_back() -> None:
    """Clients that write, read, pin, give up and vanish on a node a tenth the size of their data: no wrong byte, no lost lease."""
    process = NodeProcess("--capacity", "24MiB")
    try:
        report = asyncio.run(soak(process, SECONDS))
    finally:
        status = process.stop()
    assert report.violations == []
    assert status == 0
    assert report.operations["late"] == 0
    assert report.operations["put_blocks"] > CLIENTS
    assert report.operations["got_blocks"] > 0
    assert report.counters["evicted"] > 100
    assert report.fill_median > 0.75
