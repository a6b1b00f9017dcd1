"""Memory that several processes or hosts map: one owner writes, readers find and read records without asking it (TraCT)."""

from kvpool.tier.shared.coherence import CacheLines, Coherence, Coherent, FileSync
from kvpool.tier.shared.opening import open_shared_tier
from kvpool.tier.shared.reader import SharedTierReader
from kvpool.tier.shared.region import SharedRegion

__all__ = ["CacheLines", "Coherence", "Coherent", "FileSync", "SharedRegion", "SharedTierReader", "open_shared_tier"]
