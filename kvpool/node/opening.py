"""Which tiers a node has besides its arena, and opening them."""

from dataclasses import dataclass, field
from pathlib import Path

from kvpool.errors import ConfigError
from kvpool.policy.eviction import make_policy
from kvpool.pool.allocator import Allocator
from kvpool.pool.flow import FlowSettings
from kvpool.tier.contract import Tier
from kvpool.tier.gpu import open_gpu_tier
from kvpool.tier.sealed import SealedTier, SealKeys
from kvpool.tier.shared import open_shared_tier
from kvpool.tier.ssd import SsdTier
from kvpool.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """`ssd`: the directory of the SSD tier, None for none; or `shared`: a file or memory device (CXL) to write blocks down to instead.

    `gpu_bytes`: GPU memory for hot blocks, 0 for none. `flow`: what goes down.
    """

    ssd: Path | None = None
    ssd_bytes: int = 16 * GIB
    ssd_objects: int = 1 << 20
    ssd_key_file: Path | None = None
    """Keys by which the SSD's records are sealed; None: they lie there as they are."""
    shared: Path | None = None
    shared_bytes: int = 4 * GIB
    shared_objects: int = 1 << 16
    gpu_bytes: int = 0
    gpu_device: str = "cuda"
    flow: FlowSettings = field(default_factory=FlowSettings)

    def __post_init__(self) -> None:
        if min(self.ssd_bytes, self.ssd_objects, self.shared_bytes, self.shared_objects) < 1 or self.gpu_bytes < 0:
            raise ConfigError("a tier needs room for bytes and objects, and GPU memory can't be negative")
        if self.gpu_bytes and self.ssd is None and self.shared is None:
            raise ConfigError("GPU memory holds hot blocks of a node that writes blocks down: give --ssd or --shared too")
        if self.ssd_key_file is not None and self.ssd is None:
            raise ConfigError("--ssd-key-file seals the records of an SSD tier: give --ssd too")
        if self.ssd is not None and self.shared is not None:
            raise ConfigError("blocks are written down to one tier: give --ssd or --shared, not both")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The open tiers, and the incarnation to use: later than any that the disk remembers."""

    below: Tier | None
    beside: Tier | None
    incarnation: int

    def close(self) -> None:
        """Give them back unused."""
        for tier in (self.below, self.beside):
            if tier is not None:
                tier.close()


def open_tiers(config: TierConfig, node_id: str, incarnation: int) -> Opened:
    """Open what `config` names; the disk's index is recovered. Blocking. Raises `ConfigError`."""
    below: Tier | None = None
    if config.ssd is not None:
        keys = None if config.ssd_key_file is None else SealKeys.load(config.ssd_key_file)
        ssd = SsdTier.open(config.ssd, capacity_bytes=config.ssd_bytes, max_objects=config.ssd_objects, incarnation=incarnation)
        below, incarnation = ssd if keys is None else SealedTier(ssd, keys), ssd.incarnation
    if config.shared is not None:
        space = Allocator(config.shared_bytes)
        below = open_shared_tier(
            config.shared,
            config.shared_bytes,
            node_id,
            incarnation,
            space=space,
            policy=make_policy("lru"),
            max_objects=config.shared_objects,
        )
    beside: Tier | None = None
    if config.gpu_bytes:
        try:
            beside = open_gpu_tier(config.gpu_bytes, config.gpu_device, space=Allocator(config.gpu_bytes), policy=make_policy("lru"))
        except ConfigError:
            if below is not None:
                below.close()
            raise
    return Opened(below=below, beside=beside, incarnation=incarnation)
