"""The workers that serve this model: who lives, how to reach them, how busy this router keeps them.

Membership says who lives; its callback comes on another thread and is carried over to the event loop. A worker is one incarnation:
restarted, it is another worker with a new connection, no load and no hints. A connection closes once its worker has left and
the last request on it is done.
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from kvpool.block import KEY_BYTES, MAX_BLOCK_TOKENS, salted_root
from kvpool.clock import Clock
from kvpool.cluster import Member
from kvpool.errors import ConfigError, KvpoolError
from kvpool.request import DecodeEvent, DecodeRequest, PrefillEvent, PrefillRequest, Scope, WorkerStatus
from kvpool.units import SECOND
from router.index import WorkerRef
from router.pool import PoolView

log = logging.getLogger("router.fleet")

ROLES = ("prefill", "decode")
_SUSPECT_NS = 5 * SECOND


class WorkerPort(Protocol):
    """A connection to one worker (`kvpool.wire.worker_client.WorkerClient`). Times are in seconds; raises kvpool errors."""

    def prefill(self, request: PrefillRequest, timeout_s: float) -> AsyncIterator[PrefillEvent]:
        """`FirstToken`, then `Published`."""
        ...

    def decode(self, request: DecodeRequest, timeout_s: float) -> AsyncIterator[DecodeEvent]:
        """`Started`, `TokenOut`..., `Finished`."""
        ...

    async def status(self, timeout_s: float) -> WorkerStatus:
        """The worker's account of itself."""
        ...

    async def close(self) -> None:
        """Cancel what is in flight and disconnect."""
        ...


class ClusterView(PoolView, Protocol):
    """What the fleet needs of `kvpool.cluster.Membership`."""

    def subscribe(self, callback: Callable[[tuple[Member, ...]], None]) -> Callable[[], None]:
        """Call `callback` now and after every change, on any thread; returns what ends the subscription."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """One incarnation of one worker, with this router's load on it."""

    ref: WorkerRef
    port: WorkerPort
    root: bytes
    block_tokens: int
    context_tokens: int
    fields: bytes
    """The namespace's canonical bytes without a salt; empty from a worker that doesn't say."""
    host: str = ""
    """Which machine it runs on; empty from a worker that doesn't say."""
    users: int = 0
    """Who must not lose the connection: requests being served, and questions for its status."""
    active: int = 0
    backlog_tokens: int = 0
    suspect_until_ns: int = 0
    listed: bool = True

    @property
    def name(self) -> str:
        """For messages: role and the first digits of the id."""
        return f"{self.ref.role} worker {self.ref.id[:8]}"

    def root_of(self, scope: Scope) -> bytes:
        """The root of the keys of `scope`'s blocks in this worker. Unknown to a worker that doesn't say: one that nobody else has."""
        if not scope.salt:
            return self.root
        return salted_root(self.fields, scope.salt) if self.fields else hashlib.sha256(self.root + scope.salt).digest()


class Fleet:
    """The live workers of one model. Lives on one event loop."""

    def __init__(
        self, view: ClusterView, connect: Callable[[str], WorkerPort], model: str, clock: Clock, on_gone: Callable[[WorkerRef], None]
    ) -> None:
        """`connect` makes a port from host:port; only workers whose info names `model` count; `on_gone` hears who left for good."""
        self.view = view
        self._connect = connect
        self._model = model
        self._clock = clock
        self._on_gone = on_gone
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

    def suspected(self, worker: Worker) -> bool:
        """True for a while after a failure."""
        return self._clock.now_ns() < worker.suspect_until_ns

    def suspect(self, worker: Worker) -> None:
        """`worker` failed a request: others should prefer its peers until it is seen to leave or five seconds have passed."""
        worker.suspect_until_ns = self._clock.now_ns() + _SUSPECT_NS

    @contextmanager
    def busy(self, worker: Worker, tokens: int) -> Iterator[Callable[[], None]]:
        """Count one request, and `tokens` of backlog until the function it yields is called or the block ends."""
        left = tokens

        def through() -> None:
            nonlocal left
            worker.backlog_tokens -= left
            left = 0

        with self.hold(worker):
            worker.active += 1
            worker.backlog_tokens += tokens
            try:
                yield through
            finally:
                through()
                worker.active -= 1

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

    def _take(self, members: tuple[Member, ...]) -> None:
        """Make the workers match the view."""
        wanted = {WorkerRef(m.role, m.id, m.incarnation): m for m in members if m.role in ROLES and m.info.get("model") == self._model}
        self._refused &= wanted.keys()
        for ref, member in wanted.items():
            if ref in self._workers:
                self._workers[ref].listed = True
            elif ref not in self._refused:
                self._adopt(ref, member)
        for ref in self._workers.keys() - wanted.keys():
            self._workers[ref].listed = False
        for worker in list(self._workers.values()):
            self._let_go(worker)
        self._changed.set()
        self._changed = asyncio.Event()

    def _adopt(self, ref: WorkerRef, member: Member) -> None:
        """Connect to a worker that says about itself what a router must know; complain once about one that doesn't."""
        try:
            root = bytes.fromhex(member.info["namespace"])
            block_tokens = int(member.info["block_tokens"])
            context_tokens = int(member.info["max_tokens"])
            fields = bytes.fromhex(member.info.get("fields", ""))
            if fields:
                salted_root(fields, b"")
        except (KeyError, ValueError, ConfigError) as error:
            log.error("ignoring %s worker %s at %s: its info is unusable (%s)", member.role, ref.id, member.address, error)
            self._refused.add(ref)
            return
        if len(root) != KEY_BYTES or not 1 <= block_tokens <= MAX_BLOCK_TOKENS or context_tokens < 1:
            log.error("ignoring %s worker %s at %s: its info is out of range %s", member.role, ref.id, member.address, member.info)
            self._refused.add(ref)
            return
        self._workers[ref] = Worker(
            ref=ref,
            port=self._connect(member.address),
            root=root,
            block_tokens=block_tokens,
            context_tokens=context_tokens,
            fields=fields,
            host=member.info.get("host", ""),
        )
        log.info("%s worker %s (incarnation %d) at %s joined", member.role, ref.id, ref.incarnation, member.address)

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


async def _close(worker: Worker) -> None:
    try:
        await worker.port.close()
    except KvpoolError as error:
        log.warning("closing the connection to %s: %s", worker.name, error)
