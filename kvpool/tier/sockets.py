"""The sockets that nodes make beside their arenas: their names, and sweeping up after dead nodes.

A socket can't be locked as an arena is. One whose arena is still there belongs to a node that lives; of another one (its arena is a memory
device, or a file elsewhere, or its node is dead) the kernel knows whether anybody listens.
"""

import os
import socket
import stat
from pathlib import Path

SUFFIX = ".sock"


def socket_path(directory: Path, node_id: str, incarnation: int) -> Path:
    """Where a node makes its socket; beside its arena if that is in `directory`."""
    return directory.absolute() / f"kvpool-{node_id}-{incarnation}{SUFFIX}"


def reap_sockets(directory: Path) -> tuple[Path, ...]:
    """Unlink this user's node sockets in `directory` that nobody serves; returns them. Dead arenas are to be swept before."""
    reaped: list[Path] = []
    for path in sorted(directory.glob(f"kvpool-*{SUFFIX}")):
        try:
            status = path.lstat()
            ours = stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid()
            if ours and not path.with_suffix(".arena").exists() and _refuses(path):
                path.unlink(missing_ok=True)
                reaped.append(path)
        except OSError:
            continue  # gone meanwhile, or not ours to judge
    return tuple(reaped)


def _refuses(path: Path) -> bool:
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
            probe.connect(f"/proc/self/fd/{directory}/{path.name}")  # the path itself may be longer than an address
    except ConnectionRefusedError:
        return True
    finally:
        os.close(directory)
    return False
