"""The node's end in a process of its own, started again when it dies (`kvpool.transport.nurse`).

UCX aborts the process in states it did not foresee, and what a peer does can bring it there (`lane.py` tells of one such state and avoids
it); a node must not die of its peers.
"""

import json
import sys
from pathlib import Path

from kvpool.transport.nurse import NursedProcess
from kvpool.transport.offer import UcxOffer


class UcxTargetProcess(NursedProcess[UcxOffer]):
    """Serves `length` bytes at `data_offset` of the arena file at `path` until closed.

    Raises `ConfigError` when the first child can't serve it: no usable UCX, most often (its reasons are on standard error).
    """

    def __init__(self, path: str | Path, data_offset: int, length: int) -> None:
        command = [sys.executable, "-m", "kvpool.transport.ucx.serve", str(Path(path).absolute()), str(data_offset), str(length)]
        super().__init__(command, decode_offer, name="UCX", hint="install UCX, or leave ucx out of the offers")


def encode_offer(offer: UcxOffer) -> str:
    """One line of JSON."""
    said = {"address": offer.worker_address.hex(), "rkey": offer.rkey.hex(), "base": offer.base_address, "length": offer.length}
    return json.dumps(said)


def decode_offer(line: str | bytes) -> UcxOffer:
    """The offer in a line of `encode_offer`."""
    said = json.loads(line)
    return UcxOffer(
        worker_address=bytes.fromhex(said["address"]), rkey=bytes.fromhex(said["rkey"]), base_address=said["base"], length=said["length"]
    )
