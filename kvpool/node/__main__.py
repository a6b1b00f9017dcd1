"""`python -m kvpool.node`: run one pool node until SIGTERM or SIGINT."""

import asyncio
import logging
import signal
import sys
from pathlib import Path

import click

from kvpool.cluster import open_membership
from kvpool.errors import KvpoolError
from kvpool.node.service import OFFERS, NodeConfig, PoolNode
from kvpool.units import parse_size


@click.command()
@click.option("--cluster", default=None, help="Cluster URL (redis://host:port/0) to join; without it the node stands alone.")
@click.option("--listen", default="127.0.0.1:0", show_default=True, help="Address of the control plane.")
@click.option("--capacity", default="1GiB", show_default=True, help="Bytes of memory to pool.")
@click.option("--id", "node_id", default=None, help="Identity, 32 hex digits; a new one by default.")
@click.option("--offer", default=None, help=f"Ways to reach the bytes, of {','.join(OFFERS)}; all that work here by default.")
@click.option("--arena-dir", default="/dev/shm", show_default=True, type=click.Path(path_type=Path), help="Where shared memory is made.")
def main(cluster: str | None, listen: str, capacity: str, node_id: str | None, offer: str | None, arena_dir: Path) -> None:
    """Run one pool node."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = NodeConfig(
            listen=listen,
            capacity_bytes=parse_size(capacity),
            offers=None if offer is None else tuple(name.strip() for name in offer.split(",") if name.strip()),
            arena_directory=arena_dir,
            node_id=node_id,
        )
        asyncio.run(_run(config, cluster))
    except KvpoolError as error:
        sys.exit(f"kvpool node: {error}")


async def _run(config: NodeConfig, cluster: str | None) -> None:
    membership = await asyncio.to_thread(open_membership, cluster) if cluster else None
    node = PoolNode(config, membership)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await node.start()
        await stop.wait()
    finally:
        await node.stop()
        if membership is not None:
            await asyncio.to_thread(membership.close)


if __name__ == "__main__":
    main()
