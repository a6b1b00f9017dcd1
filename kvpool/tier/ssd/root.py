"""The superblock: which life of the log this is, kept in two copies so that one damaged page loses nothing.

Theory. A life is a number that grows with every opening. It is written and synced before anything else of that life, so no two lives
share a number even when the clock goes back, and what a crashed life left unsynced can be told from what came after it."""

import os
from typing import Final

from kvpool.errors import ConfigError, FrameError
from kvpool.tier.ssd.disk import PAGE, Disk, Piece
from kvpool.tier.ssd.format import Super, decode_super, encode_super
from kvpool.tier.ssd.lanes import aligned

NAME: Final = "superblock"
_NEW: Final = "superblock.new"
_COPIES: Final = 2


def read_super(disk: Disk) -> Super | None:
    """The newest sound copy; None when there is no file or no sound copy in it. Raises `OSError`."""
    if NAME not in disk.names():
        return None
    pages = aligned(_COPIES * PAGE)
    found: list[Super] = []
    for copy in range(_COPIES):
        page = pages[copy * PAGE : (copy + 1) * PAGE]
        if disk.read([Piece(NAME, copy * PAGE, page)])[0] == 0:
            try:
                found.append(decode_super(page.tobytes()))
            except FrameError:
                continue
    return max(found, default=None)


def write_super(disk: Disk, block: Super) -> None:
    """Replace the superblock, durably. Raises `OSError`."""
    if _NEW in disk.names():
        disk.remove(_NEW)
    disk.create(_NEW, _COPIES * PAGE)
    pages = aligned(_COPIES * PAGE)
    pages[:] = memoryview(encode_super(block) * _COPIES)
    failure = disk.write([Piece(_NEW, 0, pages)])[0] or disk.sync(_NEW)
    if failure:
        raise OSError(failure, os.strerror(failure), _NEW)
    disk.rename(_NEW, NAME)
    disk.sync_directory()


def check_segment_bytes(block: Super, segment_bytes: int) -> None:
    """Raises `ConfigError` when the log has segments of another size."""
    if block.segment_bytes != segment_bytes:
        raise ConfigError(
            f"the SSD log has segments of {block.segment_bytes} bytes, not {segment_bytes}; use that size, or empty the directory"
        )
