"""A node whose TCP data plane leaves out a step, for the read proof: `python -m kvpool.testing.read_proof_node --sabotage NAME …`.

The rest of the command line is the node's. The plane's process is this module, too, with `--plane`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from unittest.mock import patch

from kvpool.block import BlockKey
from kvpool.node import service, tcp
from kvpool.node.__main__ import main as run_node
from kvpool.node.tcp_index import BoardIndex
from kvpool.node.tcp_plane import TcpPlane
from kvpool.request.pool import TcpOffer
from kvpool.testing.read_proof_sabotage import BlindBoard, dawdle
from kvpool.tier.board import Found, Place
from kvpool.transport.nurse import NursedProcess
from kvpool.transport.tcp import Taken


class _Swapped(NursedProcess[TcpOffer]):
    """Runs this module instead of `kvpool.node.tcp`."""

    sabotage = ""

    def __init__(
        self, command: Sequence[str], parse: Callable[[bytes], TcpOffer], *, name: str, hint: str, silence_s: float | None = None
    ) -> None:
        mine = [command[0], "-m", "kvpool.testing.read_proof_node", "--plane", "--sabotage", self.sabotage]
        super().__init__([*mine, *command[3:]], parse, name=name, hint=hint, silence_s=silence_s)


class _Plane(TcpPlane, _Swapped):
    """`TcpPlane`, whose own base is now `_Swapped`."""


def _dream() -> None:
    """A busy host: long enough for a block that is the next to go to have gone."""
    dawdle(0.3, 0.03)


class _Blind(BlindBoard):
    """Holds what it has found a while ago, without another look."""

    def find(self, keys: Sequence[BlockKey] | bytes, now_ns: int) -> Found:
        found = super().find(keys, now_ns)
        _dream()
        return found

    def find_one(self, key: BlockKey | bytes, now_ns: int) -> Place | None:
        place = super().find_one(key, now_ns)
        _dream()
        return place


class _Unheld(BoardIndex):
    """Sends what it doesn't hold any more."""

    def take(self, keys: bytes, lengths: Sequence[int]) -> Taken:
        taken = super().take(keys, lengths)
        taken.release()
        _dream()
        return taken


def main() -> None:
    """The node, or its plane."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sabotage", choices=("hold", "unheld"), required=True)
    parser.add_argument("--plane", action="store_true")
    args, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    _Swapped.sabotage = args.sabotage
    if not args.plane:
        with patch.object(service, "TcpPlane", _Plane):
            run_node()
    elif args.sabotage == "hold":
        with patch.object(tcp, "BoardReader", _Blind):
            tcp.main()
    else:
        with patch.object(tcp, "BoardIndex", _Unheld):
            tcp.main()


if __name__ == "__main__":
    main()
