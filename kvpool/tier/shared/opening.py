"""A shared tier on a path: map it, make it this node's, put a tier on top."""

import logging
import time
from pathlib import Path

from kvpool.errors import ConfigError
from kvpool.policy.eviction import EvictionPolicy
from kvpool.tier.contract import DEFAULT_MAX_OBJECTS
from kvpool.tier.index import Space
from kvpool.tier.memory import MemoryTier
from kvpool.tier.region import Region, Window
from kvpool.tier.shared.coherence import Coherence
from kvpool.tier.shared.region import SharedRegion
from kvpool.tier.shared.table import SlotTable, table_bytes
from kvpool.tier.superblock import node_bytes
from kvpool.units import format_size

log = logging.getLogger(__name__)


def open_shared_tier(
    path: str | Path,
    capacity_bytes: int,
    node_id: str,
    incarnation: int,
    *,
    space: Space,
    policy: EvictionPolicy,
    max_objects: int = DEFAULT_MAX_OBJECTS,
    coherence: Coherence | None = None,
) -> MemoryTier:
    """A tier named `shared` of `capacity_bytes` in `path`: a file (made if it isn't there), or a device such as `/dev/dax0.0`.

    The region is larger by the slot table, 512 bytes for each of `max_objects`. What was in it is lost. `space` and `policy` are fresh and
    become the tier's. Raises `ConfigError` (owned by a living process, too small, no room, a bad id), `OSError` when the memory fails.
    """
    identity = node_bytes(node_id)
    if capacity_bytes < 1 or max_objects < 1:
        raise ConfigError("a shared tier needs a capacity and max_objects of at least 1")
    region = SharedRegion.own(path, table_bytes(max_objects) + capacity_bytes, coherence)
    try:
        tier = share(region, capacity_bytes, identity, incarnation, space=space, policy=policy, max_objects=max_objects)
    except (ConfigError, OSError):
        region.close()
        raise
    log.info(
        "shared tier: %s in %s (%s), table of %s for %d records",
        *(format_size(capacity_bytes), path, region.coherence.name, format_size(table_bytes(max_objects)), max_objects),
    )
    return tier


def share(
    region: Region, capacity_bytes: int, node_id: bytes, incarnation: int, *, space: Space, policy: EvictionPolicy, max_objects: int
) -> MemoryTier:
    """The same over a region of any kind, at least `table_bytes(max_objects) + capacity_bytes` large."""
    now_ns = time.time_ns()
    table = SlotTable(region, capacity=capacity_bytes, max_objects=max_objects, node_id=node_id, incarnation=incarnation, now_ns=now_ns)
    data = Window(region, table.shape.data_offset, capacity_bytes)
    return MemoryTier(data, space, policy, name="shared", max_objects=max_objects, catalog=table)
