"""The SSD tier: an append-only log of segments in one directory."""

from kvpool.tier.ssd.disk import PAGE, Disk, Piece
from kvpool.tier.ssd.file_disk import FileDisk
from kvpool.tier.ssd.recover import Recovery
from kvpool.tier.ssd.tier import SsdTier

__all__ = ["PAGE", "Disk", "FileDisk", "Piece", "Recovery", "SsdTier"]
