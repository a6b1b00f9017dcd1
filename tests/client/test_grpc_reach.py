"""The gRPC reach passes the kit, across processes."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.client.grpc_reach import GrpcReach
from kvpool.testing.reach_kit import WINDOW_BYTES, FarSide, ReachKit
from kvpool.tier import ArenaMapping
from kvpool.transport import Reach
from kvpool.units import MIB
from kvpool.wire.fence import NodeIdentity

OWNER = Path(__file__).with_name("grpc_owner.py")
NODE_ID = "ab" * 16


class GrpcFar:
    """`FarSide` over an owner process."""

    offset = MIB + 64
    lease_id = 1
    outlives_owner = False
    serves_frozen = False

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, str(OWNER), str(directory), str(WINDOW_BYTES + 2 * MIB + 4097)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        path, self.address = self.process.stdout.readline().split()
        self.mapping = ArenaMapping.open(path, NODE_ID, 1)
        self.arena_bytes = self.mapping.capacity
        self.window = self.mapping.view(self.offset, WINDOW_BYTES)
        self.opened: list[Reach] = []

    def open(self) -> Reach:
        self.opened.append(GrpcReach(self.address, NodeIdentity(NODE_ID, 1), self.arena_bytes))
        return self.opened[-1]

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def end(self) -> None:
        for reach in self.opened:
            reach.close()
        self.kill()
        self.mapping.close()
        if self.process.stdout is not None:
            self.process.stdout.close()


class TestGrpcReach(ReachKit):
    """Every byte goes through the node's event loop, so it must be alive."""

    @pytest.fixture
    def far(self, tmp_path: Path) -> Iterator[FarSide]:
        far = GrpcFar(tmp_path)
        yield far
        far.end()
