"""A session's two ends in one test: the server on the test's loop with a host that notes what it is asked, clients in threads."""

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kvpool.errors import ConfigError
from kvpool.request.pool import Reservation
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.session import Answer, Greeting, Kind, Request, encode_greeting
from kvpool.wire.session_client import Session
from kvpool.wire.session_server import SessionServer

T = TypeVar("T")

NODE = NodeIdentity("0123456789abcdef" * 2, 1 << 60)
DEADLINE_S = 20.0


def block(number: int, *, length: int = 4096) -> Reservation:
    """A reservation with a value in every field."""
    return Reservation(bytes([number]) * 32, bytes([number + 1]) * 32, 16 * number, length, 1000, 7, 2000)


@dataclass
class FakeCalls:
    """Answers by the rules of the format and notes the calls."""

    owner: str
    asked: list[Request] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    answers: Callable[[Request], Answer] | None = None

    def serve(self, request: Request) -> Answer:
        self.asked.append(request)
        if self.answers is not None:
            return self.answers(request)
        if any(one.priority > 100 for one in request.blocks):
            raise ConfigError("priority 0 to 100")
        match request.kind:
            case Kind.SLAB:
                return Answer(5, 640, request.nbytes)
            case Kind.PUT:
                return Answer(6, 1280, request.nbytes, bytes(i % 3 for i in range(len(request.blocks))))
            case Kind.RESERVE:
                count = len(request.blocks)
                return Answer(7, outcomes=bytes(count), offsets=tuple(64 * i for i in range(count)), waiting=request.near)
            case Kind.COMMIT:
                return Answer(outcomes=bytes(i % 2 for i in range(len(request.keys))))
        return Answer()

    def end(self, *, gone: bool) -> None:
        self.ended.append(gone)


class FakeHost:
    """Takes everybody in."""

    identity = NODE

    def __init__(self) -> None:
        self.board_fd = os.memfd_create("board")
        os.write(self.board_fd, b"the board")
        self.calls: list[FakeCalls] = []
        self.cells: list[bytes] = []

    def open(self, owner: str, pid: int, cell_fd: int) -> FakeCalls:
        assert pid == os.getpid()
        self.cells.append(os.pread(cell_fd, 100, 0))
        self.calls.append(FakeCalls(owner))
        return self.calls[-1]


class Rig:
    """The server at `path`."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "node.sock"
        self.host = FakeHost()
        self.server = SessionServer(self.path, self.host)
        self.server.start()
        self.cell_fd = os.memfd_create("cell")
        os.write(self.cell_fd, b"the cell")

    async def session(self, node: NodeIdentity = NODE, owner: str = "tester") -> Session:
        return await asyncio.to_thread(Session.open, str(self.path), node, owner, self.cell_fd, DEADLINE_S)

    async def raw(self) -> socket.socket:
        """A client that may say anything."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(DEADLINE_S)
        await asyncio.to_thread(sock.connect, str(self.path))
        return sock

    async def greeted(self) -> socket.socket:
        """One that has said who it is, and may say anything then."""
        sock = await self.raw()
        socket.send_fds(sock, [encode_greeting(Greeting(NODE, "raw"))], [self.cell_fd])
        _, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, sock, 1 << 16, 1)
        for descriptor in descriptors:
            os.close(descriptor)
        return sock

    async def until(self, condition: Callable[[], Any]) -> None:
        """Let the loop run until something has happened."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    def close(self) -> None:
        self.server.close()
        os.close(self.cell_fd)
        os.close(self.host.board_fd)


def open_descriptors() -> set[str]:
    """What this process has open: pipes, sockets and memory files, by what they are."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue  # the listing's own
    return found
