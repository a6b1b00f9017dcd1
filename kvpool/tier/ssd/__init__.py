"""The SSD tier: an append-only log of segments in one directory."""

from kvpool.tier.ssd.disk import PAGE, Disk, Piece
from kvpool.tier.ssd.file_disk import FileDisk

__all__ = ["PAGE", "Disk", "FileDisk", "Piece"]
