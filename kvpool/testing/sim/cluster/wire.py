"""Calls between processes over links that are late, lose, and are cut in one direction; and the fence at the far end.

Theory. A link is a pair of names, one direction. What is sent over a cut link is lost, and its caller learns that by its own deadline, as
with a partition; so does a call to a machine without power. A process that was killed on a running machine refuses calls, and resets those
under way. A frozen one takes calls and doesn't answer them. Processes of one host reach each other whatever the network does.

`SimRpc` and `SimPeerRpc` stand where the client and the node have `PoolRpc` and `PeerRpc`; calls carry values, not bytes.
"""

import asyncio
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple, Protocol

from kvpool.errors import DeadlineError, KvpoolError, UnavailableError
from kvpool.request.pool import Grant, NodeDescription, Place, Reservation, Stored
from kvpool.testing.sim.cluster.vloop import Process, VirtualLoop, current_process
from kvpool.testing.sim.marks import Coverage
from kvpool.units import SECOND
from kvpool.wire.fence import NodeIdentity

STORE = "store"
"""The name of the membership store's machine."""


class Call(NamedTuple):
    """One call under way: from whom, whom it is meant for (None: anybody), what, and where the answer goes."""

    caller: Process
    meant: NodeIdentity | None
    what: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    deadline_ns: int
    answer: "asyncio.Future[Any]"


class Server(Protocol):
    """What listens at an address."""

    process: Process

    def serve(self, call: Call) -> None:
        """Take a call; `Network.reply` brings the answer."""
        ...


class Network:
    """All links of one world. `delay_ns` and `jitter_ns` of a message, `loss` of it being lost."""

    def __init__(self, loop: VirtualLoop, rng: Random, coverage: Coverage, *, delay_ns: int, jitter_ns: int, loss: float) -> None:
        self.loop = loop
        self.coverage = coverage
        self.healed = False
        self.servers: dict[str, Server] = {}
        """By name."""
        self.dark: set[str] = set()
        """Machines without power."""
        self._rng = rng
        self._delay_ns = delay_ns
        self._jitter_ns = jitter_ns
        self._loss = loss
        self._cut: dict[tuple[str, str], int] = {}
        self._open: dict[asyncio.Future[Any], tuple[str, Process]] = {}

    def cut(self, source: str, target: str, until_ns: int) -> None:
        """Lose what `source` sends to `target` until then."""
        self._cut[source, target] = until_ns

    def heal(self) -> None:
        """No more faults from here on."""
        self.healed = True
        self._cut.clear()
        self.dark.clear()

    def passes(self, source: str, target: str) -> bool:
        """Whether the link is whole."""
        return target not in self.dark and self.loop.now_ns >= self._cut.get((source, target), 0)

    def delay_ns(self, source: Process, target: Process | None, name: str) -> int | None:
        """How long a message sent now to `name` takes; None: it is lost."""
        delay_ns = self._delay_ns + int(self._rng.random() * self._jitter_ns)
        if target is not None and target.host == source.host:
            return delay_ns
        if not self.passes(source.name, name) or (self._loss and not self.healed and self._rng.random() < self._loss):
            self.coverage.hit("message lost")
            return None
        return delay_ns

    def request(self, address: str, call: Call) -> None:
        """Send a call."""
        server = self.servers.get(address)
        delay_ns = self.delay_ns(call.caller, None if server is None else server.process, address)
        if delay_ns is not None:
            self.loop.later(delay_ns, self._arrive, address, call)

    def reply(self, server: Process, call: Call, outcome: Any) -> None:
        """Send an answer back: a value, or a `KvpoolError`."""
        self._open.pop(call.answer, None)
        delay_ns = self.delay_ns(server, call.caller, call.caller.name)
        if delay_ns is not None:
            self.loop.later(delay_ns, _settle, call.answer, outcome)

    def reset(self, server: Process) -> None:
        """The process is dead: its machine says so to whoever waits for it, unless it is dark."""
        for answer, (name, process) in list(self._open.items()):
            if name == server.name:
                del self._open[answer]
                if server.name not in self.dark and self.passes(server.name, process.name):
                    self.loop.later(self._delay_ns, _settle, answer, UnavailableError(f"{name}: connection reset"))

    def _arrive(self, address: str, call: Call) -> None:
        if address in self.dark:
            return
        server = self.servers.get(address)
        if server is None:
            back_ns = self._delay_ns if self.passes(address, call.caller.name) else None
            if back_ns is not None:
                self.loop.later(back_ns, _settle, call.answer, UnavailableError(f"{address}: connection refused"))
            return
        self.loop.events += 1
        self._open[call.answer] = address, call.caller
        server.serve(call)


def _settle(answer: "asyncio.Future[Any]", outcome: Any) -> None:
    if answer.done():
        return
    if isinstance(outcome, KvpoolError):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


class _Rpc:
    """One connection: what is under way ends when it is closed."""

    def __init__(self, network: Network, address: str, node: NodeIdentity | None) -> None:
        self.address = address
        self._network = network
        self._name = address.partition(":")[0]
        self._node = node
        self._closed = False
        self._flying: dict[asyncio.Future[Any], None] = {}

    async def close(self) -> None:
        """Give up what is under way."""
        self._closed = True
        for answer in self._flying:
            _settle(answer, UnavailableError(f"{self.address}: the connection was closed during the call"))

    async def _call(self, what: str, timeout_s: float, *arguments: Any, **options: Any) -> Any:
        if self._closed:
            raise UnavailableError(f"{self.address}: the connection was closed before the call")
        loop = self._network.loop
        answer = loop.create_future()
        timer = loop.call_later(timeout_s, _settle, answer, DeadlineError(f"{self.address}: {what} took longer than {timeout_s:.3f} s"))
        self._flying[answer] = None
        deadline_ns = loop.now_ns + int(timeout_s * SECOND)
        self._network.request(self._name, Call(current_process(), self._node, what, arguments, options, deadline_ns, answer))
        try:
            return await answer
        finally:
            timer.cancel()
            del self._flying[answer]


class SimRpc(_Rpc):
    """See `kvpool.wire.pool_client.PoolRpc`."""

    async def describe(self, timeout_s: float) -> NodeDescription:
        """See `PoolRpc`."""
        description: NodeDescription = await self._call("describe", timeout_s)
        return description

    async def lookup(self, keys: Sequence[bytes], timeout_s: float) -> bytes:
        """See `PoolRpc`."""
        present: bytes = await self._call("lookup", timeout_s, tuple(keys))
        return present

    async def reserve(
        self,
        owner: str,
        lease_ms: int,
        blocks: Sequence[Reservation],
        timeout_s: float,
        *,
        sequence: int = 0,
        tenant: str = "",
        near: bool = False,
    ) -> tuple[int, list[Grant]]:
        """See `PoolRpc`."""
        answer: tuple[int, list[Grant]] = await self._call(
            "reserve", timeout_s, owner, lease_ms, tuple(blocks), sequence=sequence, tenant=tenant, near=near
        )
        return answer

    async def commit(self, lease_id: int, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """See `PoolRpc`."""
        done: list[bool] = await self._call("commit", timeout_s, lease_id, tuple(keys))
        return done

    async def acquire(
        self, owner: str, lease_ms: int, keys: Sequence[bytes], timeout_s: float, *, sequence: int = 0, fetch_from: Sequence[str] = ()
    ) -> tuple[int, list[Place | None]]:
        """See `PoolRpc`."""
        answer: tuple[int, list[Place | None]] = await self._call(
            "acquire", timeout_s, owner, lease_ms, tuple(keys), sequence=sequence, fetch_from=tuple(fetch_from)
        )
        return answer

    async def acquire_stored(self, owner: str, lease_ms: int, keys: Sequence[bytes], timeout_s: float) -> tuple[int, list[Stored | None]]:
        """See `PoolRpc`."""
        answer: tuple[int, list[Stored | None]] = await self._call("acquire_stored", timeout_s, owner, lease_ms, tuple(keys))
        return answer

    async def renew(self, lease_id: int, lease_ms: int, timeout_s: float) -> bool:
        """See `PoolRpc`."""
        alive: bool = await self._call("renew", timeout_s, lease_id, lease_ms)
        return alive

    async def release(self, lease_id: int, suspect: Sequence[bytes], timeout_s: float) -> None:
        """See `PoolRpc`."""
        await self._call("release", timeout_s, lease_id, tuple(suspect))


class SimPeerRpc(_Rpc):
    """See `kvpool.wire.peer_client.PeerRpc`."""

    async def handed_over(self, me: NodeIdentity, timeout_s: float) -> bool:
        """See `PeerRpc`."""
        done: bool = await self._call("handed_over", timeout_s, me)
        return done
