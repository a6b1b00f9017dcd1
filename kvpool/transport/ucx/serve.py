"""`python -m kvpool.transport.ucx.serve PATH OFFSET LENGTH`: serve a part of a file in shared memory over UCX until standard input ends.

Started by `UcxTargetProcess`, which reads the one line it prints: the offer. Pages are faulted in afterwards, a step at a time, because the
first touch of each would otherwise be paid by a transfer.
"""

import argparse
import contextlib
import logging
import mmap
import os
import select
import signal
import sys

import numpy as np

from kvpool.errors import KvpoolError
from kvpool.transport.ucx.process import encode_offer
from kvpool.transport.ucx.target import UcxTarget
from kvpool.units import MIB

_POPULATE_WRITE = 23  # linux/mman.h, since 5.14
_STEP = 4 * MIB  # less than a millisecond: the call holds the GIL


def main() -> None:
    """Serve; exit 0 when standard input ends, 1 when there is nothing to serve with (said on standard error)."""
    parser = argparse.ArgumentParser(prog="python -m kvpool.transport.ucx.serve")
    parser.add_argument("path")
    parser.add_argument("offset", type=int)
    parser.add_argument("length", type=int)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="ucx data plane: %(message)s")
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.SIG_IGN)  # these reach a whole group at once; when this process ends, the node decides
    try:
        mapping = _map(args.path, args.offset, args.length)
        target = UcxTarget(np.frombuffer(mapping, dtype=np.uint8))
    except (KvpoolError, OSError, ValueError) as error:
        raise SystemExit(f"ucx data plane: {error}") from error
    print(encode_offer(target.offer), flush=True)
    _populate_until_told_to_end(mapping)
    os.read(sys.stdin.fileno(), 1)
    target.close()


def _map(path: str, offset: int, length: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
    finally:
        os.close(descriptor)


def _populate_until_told_to_end(mapping: mmap.mmap) -> None:
    with contextlib.suppress(OSError):  # an older kernel: the first touch is slower, nothing else
        for start in range(0, len(mapping), _STEP):
            if select.select([sys.stdin], [], [], 0)[0]:
                return
            mapping.madvise(_POPULATE_WRITE, start, min(_STEP, len(mapping) - start))


if __name__ == "__main__":
    main()
