"""`python -m kvpool.node`: run one pool node until SIGTERM or SIGINT."""

import asyncio
import inspect
import logging
import signal
import sys
from pathlib import Path
from typing import Any, Literal

import click

from kvpool.cluster import open_membership
from kvpool.errors import ConfigError, KvpoolError
from kvpool.node.cluster import NodePlace
from kvpool.node.opening import TierConfig
from kvpool.node.service import DEFAULT_POLICY, FENCE_NS, OFFERS, NodeConfig, PoolNode
from kvpool.policy.eviction import POLICIES
from kvpool.pool import PoolLimits
from kvpool.pool.flow import FlowSettings
from kvpool.units import parse_size
from kvpool.wire.flags import guard_options
from kvpool.wire.guard import Guard


@click.command()
@click.option(
    "--cluster", envvar="KVPOOL_CLUSTER", default=None, help="Cluster URL (redis://host:port/0) to join; without it the node stands alone."
)
@click.option("--listen", default="127.0.0.1:0", show_default=True, help="Address of the control plane.")
@click.option("--capacity", default="1GiB", show_default=True, help="Bytes of memory to pool.")
@click.option("--id", "node_id", default=None, help="Identity, 32 hex digits; a new one by default.")
@click.option("--offer", default=None, help=f"Ways to reach the bytes, of {','.join(OFFERS)}; all that work here by default.")
@click.option("--tcp-listen", default="", help="Address of the TCP data plane; any free port of --listen's host by default.")
@click.option(
    "--resp-port", default=None, type=click.IntRange(0, 65535), help="Serve clients of Redis, too, at this port of --listen's host."
)
@click.option("--arena-dir", default="/dev/shm", show_default=True, type=click.Path(path_type=Path), help="Where shared memory is made.")
@click.option("--arena", "arena_path", default=None, type=click.Path(path_type=Path), help="A file or memory device (/dev/dax0.0) instead.")
@click.option("--lock-memory", is_flag=True, help="Ask for memory that is never swapped out.")
@click.option("--policy", default=DEFAULT_POLICY, show_default=True, type=click.Choice(list(POLICIES)), help="Who is evicted first.")
@click.option("--ssd", default=None, type=click.Path(path_type=Path, file_okay=False), help="Directory of the SSD tier; none by default.")
@click.option("--ssd-capacity", default="16GiB", show_default=True, help="Bytes of the SSD tier.")
@click.option("--ssd-objects", default=1 << 20, show_default=True, type=click.IntRange(1), help="Blocks the SSD tier holds at most.")
@click.option(
    "--ssd-key-file", default=None, type=click.Path(path_type=Path, dir_okay=False), help="File of keys to seal the SSD's records by."
)
@click.option("--write", default="through", show_default=True, type=click.Choice(["through", "back"]), help="When blocks go to the SSD.")
@click.option("--admission", default="all", show_default=True, type=click.Choice(["all", "hot"]), help="Which blocks go to the SSD.")
@click.option("--shared", default=None, type=click.Path(path_type=Path), help="File or memory device to write blocks down to, instead.")
@click.option("--shared-capacity", default="4GiB", show_default=True, help="Bytes of the shared tier.")
@click.option("--gpu", "gpu_capacity", default="0", show_default=True, help="Bytes of GPU memory for hot blocks.")
@click.option("--gpu-device", default="cuda", show_default=True, help="Where they are: a torch device.")
@click.option("--max-blocks", default=PoolLimits().max_blocks, show_default=True, type=click.IntRange(1), help="Blocks in memory at most.")
@click.option("--weight", default=None, type=float, help="Share of the blocks compared with other nodes; the capacity in GiB by default.")
@click.option("--host", default=None, help="Name of the host that it fails with; this machine by default.")
@click.option("--rack", default="", help="Name of the rack that it fails with.")
@click.option("--zone", default="", help="Name of the zone that it fails with.")
@guard_options
def main(
    cluster: str | None,
    listen: str,
    capacity: str,
    node_id: str | None,
    offer: str | None,
    tcp_listen: str,
    resp_port: int | None,
    arena_dir: Path,
    arena_path: Path | None,
    lock_memory: bool,
    policy: str,
    max_blocks: int,
    **more: Any,
) -> None:
    """Run one pool node."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = NodeConfig(
            listen=listen,
            tcp_listen=tcp_listen,
            resp_port=resp_port,
            capacity_bytes=parse_size(capacity),
            offers=None if offer is None else tuple(name.strip() for name in offer.split(",") if name.strip()),
            arena_directory=arena_dir,
            arena_path=arena_path,
            lock_memory=lock_memory,
            node_id=node_id,
            policy=policy,
            limits=PoolLimits(max_blocks=max_blocks, fence_ns=FENCE_NS),
            tiers=_tier_config(**{name: more[name] for name in _TIER_FLAGS}),
            guard=_guard(more),
            place=NodePlace(**{name: more[name] for name in ("weight", "host", "rack", "zone")}),
        )
        asyncio.run(_run(config, cluster))
    except KvpoolError as error:
        sys.exit(f"kvpool node: {error}")


def _tier_config(
    ssd: Path | None,
    ssd_capacity: str,
    ssd_objects: int,
    ssd_key_file: Path | None,
    write: Literal["through", "back"],
    admission: Literal["all", "hot"],
    shared: Path | None,
    shared_capacity: str,
    gpu_capacity: str,
    gpu_device: str,
) -> TierConfig:
    return TierConfig(
        ssd=ssd,
        ssd_bytes=parse_size(ssd_capacity),
        ssd_objects=ssd_objects,
        ssd_key_file=ssd_key_file,
        shared=shared,
        shared_bytes=parse_size(shared_capacity),
        gpu_bytes=parse_size(gpu_capacity),
        gpu_device=gpu_device,
        flow=FlowSettings(write=write, admission=admission),
    )


_TIER_FLAGS = tuple(inspect.signature(_tier_config).parameters)


def _guard(flags: dict[str, Any]) -> Guard:
    """What callers are asked; what tenants may is kept beside the SSD's log unless told otherwise."""
    ssd: Path | None = flags["ssd"]
    if ssd is not None:
        try:
            ssd.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--ssd {ssd} can't be made: {error.strerror}; give a directory that can be written") from None
    return Guard.open(flags, default_book=None if ssd is None else ssd / "tenants.json")


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
