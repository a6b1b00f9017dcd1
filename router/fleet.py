"""The workers that serve this model: who lives, how to reach them, how busy they are kept, and who has room for one request more.

Membership says who lives; its callback comes on another thread and is carried over to the event loop. A connection closes once its worker
has left and the last request on it is done. A worker that drains keeps what it has and gets nothing new.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from kvpool.clock import Clock
from kvpool.cluster import Member
from kvpool.errors import ConfigError, KvpoolError
from kvpool.policy.routing import WorkerRef
from kvpool.request import DRAINING
from router.pool import PoolView
from router.settings import Limits
from router.worker import NOT_ELSEWHERE, ROLES, Elsewhere, Place, Said, Worker, WorkerPort, adapters_in

log = logging.getLogger("router.fleet")


class ClusterView(PoolView, Protocol):
    """What the fleet needs of `kvpool.cluster.Membership`."""

    def subscribe(self, callback: Callable[[tuple[Member, ...]], None]) -> Callable[[], None]:
        """Call `callback` now and after every change, on any thread; returns what ends the subscription."""
        ...


class Fleet:
    """The live workers of one model. Lives on one event loop."""

    def __init__(
        self,
        view: ClusterView,
        connect: Callable[[str], WorkerPort],
        model: str,
        clock: Clock,
        on_gone: Callable[[WorkerRef], None],
        limits: Limits | None = None,
    ) -> None:
        """`connect` makes a port from host:port; only workers whose info names `model` count; `on_gone` hears who left for good."""
        self.view = view
        self.on_joined: Callable[[Worker], None] = lambda worker: None
        self.on_room: Callable[[], None] = lambda: None
        """Called when a worker may have room that had none."""
        self._connect = connect
        self._model = model
        self._clock = clock
        self._on_gone = on_gone
        limits = limits or Limits()
        self._slots = {"prefill": limits.prefill_slots, "decode": limits.decode_slots}
        self._workers: dict[WorkerRef, Worker] = {}
        self._refused: set[WorkerRef] = set()
        self._changed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self._unsubscribe: Callable[[], None] | None = None

    def start(self) -> None:
        """Follow the view from now on; call on the event loop."""
        loop = asyncio.get_running_loop()

        def moved(members: tuple[Member, ...]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._take, members)

        self._take(self.view.members())
        self._unsubscribe = self.view.subscribe(moved)

    async def close(self) -> None:
        """Stop following and close every connection."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        workers, self._workers = list(self._workers.values()), {}
        for worker in workers:
            self._disconnect(worker)
        if self._closing:
            await asyncio.wait(self._closing)

    def alive(self, role: str) -> list[Worker]:
        """Live workers of `role`, by identity."""
        return [worker for ref, worker in sorted(self._workers.items(), key=lambda item: item[0]) if ref.role == role and worker.listed]

    def offered(self, role: str) -> list[Worker]:
        """Live workers of `role` that take new requests, by identity."""
        return [worker for worker in self.alive(role) if not worker.draining]

    def room(self, role: str) -> int | None:
        """Requests that the workers of `role` may be given now; None when there is no worker.

        One that rests after a failure has room only when there is no other, and then for one request.
        """
        workers, now_ns = self.offered(role), self._clock.now_ns()
        if not workers:
            return None
        awake = [worker for worker in workers if not worker.trust.rests(now_ns)]
        return sum(self.room_of(worker) for worker in awake or workers)

    def room_of(self, worker: Worker) -> int:
        """Requests that `worker` may be given now, whether it rests or not."""
        return max(0, min(self._slots_of(worker) - worker.load, worker.trust.left(worker.queued)))

    def suspected(self, worker: Worker) -> bool:
        """True for a while after a failure."""
        return worker.trust.rests(self._clock.now_ns())

    def suspect(self, worker: Worker) -> None:
        """`worker` failed a request: others should prefer its peers until it is seen to leave or has rested."""
        worker.trust.failed(self._clock.now_ns())

    def shared(self, found: Mapping[WorkerRef, Elsewhere]) -> None:
        """What the other routers keep workers busy with, as known now."""
        for ref, worker in self._workers.items():
            worker.elsewhere = found.get(ref, NOT_ELSEWHERE)
        self.on_room()

    @contextmanager
    def busy(self, worker: Worker, tokens: int, *, decode_tokens: int = 0, sent: bool = False) -> Iterator[Place]:
        """Count one request, and `tokens` of backlog until its place is told that it is through, for the length of the block."""
        with self.hold(worker):
            place = Place(worker, backlog_tokens=tokens, decode_tokens=decode_tokens, sent=sent)
            try:
                yield place
            finally:
                place.close()
                asyncio.get_running_loop().call_soon(self.on_room)  # not before whoever asked has said how it went

    @contextmanager
    def hold(self, worker: Worker) -> Iterator[None]:
        """Keep the connection to `worker` open, even if it leaves meanwhile."""
        worker.users += 1
        try:
            yield
        finally:
            worker.users -= 1
            self._let_go(worker)

    async def wait_for_change(self, timeout_s: float) -> bool:
        """Wait until the workers change; False when `timeout_s` passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _slots_of(self, worker: Worker) -> int:
        """Requests that `worker` serves at once; prefills are kept back here, where their order can still change."""
        limit = self._slots[worker.ref.role]
        return min(limit, worker.said.slots) if worker.said.slots else limit

    def _take(self, members: tuple[Member, ...]) -> None:
        """Make the workers match the view."""
        wanted = {WorkerRef(m.role, m.id, m.incarnation): m for m in members if m.role in ROLES and m.info.get("model") == self._model}
        self._refused &= wanted.keys()
        for ref, member in wanted.items():
            if ref not in self._workers and ref not in self._refused:
                self._adopt(ref, member)
            if ref in self._workers:
                self._workers[ref].listed = True
                self._workers[ref].draining = member.info.get("state") == DRAINING
                self._workers[ref].adapters = _adapters_of(member)
        for ref in self._workers.keys() - wanted.keys():
            self._workers[ref].listed = False
        for worker in list(self._workers.values()):
            self._let_go(worker)
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_room()

    def _adopt(self, ref: WorkerRef, member: Member) -> None:
        """Connect to a worker that says about itself what a router must know; complain once about one that doesn't."""
        try:
            said = Said.of(member.info)
        except ConfigError as error:
            log.error("ignoring %s worker %s at %s: %s", member.role, ref.id, member.address, error)
            self._refused.add(ref)
            return
        worker = self._workers[ref] = Worker(ref=ref, port=self._connect(member.address), said=said)
        log.info("%s worker %s (incarnation %d) at %s joined", member.role, ref.id, ref.incarnation, member.address)
        self.on_joined(worker)

    def _let_go(self, worker: Worker) -> None:
        """Close the connection of a worker that has left and serves nothing."""
        if not worker.listed and worker.users == 0 and self._workers.pop(worker.ref, None) is not None:
            log.info("%s worker %s (incarnation %d) is gone", worker.ref.role, worker.ref.id, worker.ref.incarnation)
            self._on_gone(worker.ref)
            self._disconnect(worker)

    def _disconnect(self, worker: Worker) -> None:
        task = asyncio.get_running_loop().create_task(_close(worker))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _adapters_of(member: Member) -> frozenset[str]:
    try:
        return adapters_in(member.info)
    except ConfigError as error:
        log.error("%s worker %s at %s is used without adapters: %s", member.role, member.id, member.address, error)
        return frozenset()


async def _close(worker: Worker) -> None:
    try:
        await worker.port.close()
    except KvpoolError as error:
        log.warning("closing the connection to %s: %s", worker.name, error)
