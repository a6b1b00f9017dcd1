"""A worker as a process: flags, model, engine, gRPC server, membership. Both workers are this with another role.

It joins the cluster when it can serve. Told to stop it says `draining`, so that nobody sends it anything new, serves what it has, leaves,
and closes; what hasn't ended after `drain_s` is cancelled, which a router answers by asking another worker.
"""

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator
from typing import Protocol

import grpc.aio

from kvpool.client import AsyncPoolClient
from kvpool.clock import seconds_left
from kvpool.cluster import Membership, Registration, open_membership
from kvpool.engine.attention.settings import spell_attention
from kvpool.engine.engine import Engine
from kvpool.engine.model import Model
from kvpool.engine.settings import Role, WorkerConfig
from kvpool.engine.store import BlockStore, NullStore
from kvpool.errors import ConfigError, UnavailableError
from kvpool.request import DRAINING, DecodeEvent, DecodeRequest, PrefillEvent, PrefillRequest, WorkerStatus
from kvpool.transport import host_boot_id
from kvpool.units import SECOND
from kvpool.wire.events_server import add_events
from kvpool.wire.worker_server import add_worker

log = logging.getLogger(__name__)

_JOIN_RETRY_S = 1.0
_CLOSE_NS = 3 * SECOND
_LOOK_S = 0.05


class _Closing(Protocol):
    async def close(self) -> None: ...


class RoleHandler:
    """The worker's calls: those of its role go to the engine, the others are refused with a pointer to who serves them."""

    def __init__(self, engine: Engine, role: Role, served_name: str) -> None:
        self._engine = engine
        self._role = role
        self._served_name = served_name

    def prefill(self, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        """Serve a prefill, if this is a prefill worker."""
        self._only("prefill")
        log.info("%s: prefill of %d tokens", request.request_id, len(request.prompt))
        return self._engine.prefill(request)

    def decode(self, request: DecodeRequest) -> AsyncIterator[DecodeEvent]:
        """Serve a decode, if this is a decode worker."""
        self._only("decode")
        log.info("%s: decode after %d + %d tokens", request.request_id, len(request.prompt), len(request.generated))
        return self._engine.decode(request)

    async def status(self) -> WorkerStatus:
        """What the engine is doing."""
        return self._engine.status(role=self._role, model=self._served_name)

    def _only(self, role: Role) -> None:
        if role != self._role:
            raise ConfigError(f"this is a {self._role} worker; it doesn't {role}. Send the request to a member with role {role!r}")


class WorkerApp:
    """One worker: `await start()`, then it serves at `address` until `await stop()`."""

    def __init__(self, config: WorkerConfig, model: Model) -> None:
        self._config = config
        self._model = model
        self._engine: Engine | None = None
        self._server: grpc.aio.Server | None = None
        self._pool: _Closing | None = None
        self._membership: Membership | None = None
        self._joining: asyncio.Task[None] | None = None
        self._registration: Registration | None = None
        self.address = ""

    async def start(self) -> None:
        """Connect to the pool, warm the engine up, listen, join (in the background while the membership's store is down)."""
        config = self._config
        store: BlockStore = NullStore()
        if config.cluster is not None:
            self._membership = await asyncio.to_thread(open_membership, config.cluster)
            client = await AsyncPoolClient.open(
                self._membership, self._model.namespace, transport=config.transport, eager=True, security=config.guard.security
            )
            store, self._pool = client, client
        self._engine = Engine(self._model, store, config.settings)
        await self._engine.warm_up()
        self._server = config.guard.server()
        add_worker(self._server, RoleHandler(self._engine, config.role, config.served_name))
        add_events(self._server, self._engine.events)
        self.address = config.guard.bind(self._server, config.listen)
        await self._server.start()
        log.info("%s worker for %s serves at %s", config.role, config.served_name, self.address)
        if self._membership is not None:
            self._joining = asyncio.create_task(self._join(self._membership, self._engine))

    async def joined(self) -> None:
        """Wait until this worker is a member (at once without a cluster)."""
        if self._joining is not None:
            await asyncio.shield(self._joining)

    async def stop(self) -> None:
        """Drain and leave, `drain_s` at most; cancel the rest, close. Takes at most a few seconds more. Again: nothing."""
        end_ns = time.monotonic_ns() + int(self._config.drain_s * SECOND)
        if self._joining is not None:
            self._joining.cancel()
            await asyncio.gather(self._joining, return_exceptions=True)
        if self._registration is not None and self._engine is not None:
            await self._drain(self._registration, self._engine, end_ns)
        if self._membership is not None:
            await asyncio.to_thread(self._membership.close)  # leaves
        if self._server is not None:
            await self._server.stop(grace=seconds_left(end_ns))
        if self._engine is not None:
            await self._engine.close(time.monotonic_ns() + _CLOSE_NS)
        if self._pool is not None:
            await self._pool.close()
        self._joining = self._registration = self._membership = self._server = self._engine = self._pool = None

    async def _drain(self, registration: Registration, engine: Engine, end_ns: int) -> None:
        """Say so, and serve until nothing is left to serve, what still comes included; at most until `end_ns`."""
        registration.update({**registration.member.info, "state": DRAINING})
        while engine.busy and time.monotonic_ns() < end_ns:  # noqa: ASYNC110 - requests end in many places
            await asyncio.sleep(min(_LOOK_S, seconds_left(end_ns)))

    async def _join(self, membership: Membership, engine: Engine) -> None:
        info = {
            "model": self._config.served_name,
            "namespace": self._model.namespace.root().hex(),
            "fields": self._model.namespace.canonical().hex(),
            "block_tokens": str(self._model.geometry.block_tokens),
            "max_tokens": str(engine.context_tokens),
            "slots": str(self._config.settings.max_active),
            "kv_tokens": str(self._config.settings.kv_bytes // self._model.geometry.bytes_per_token),
            "token_bytes": str(self._model.geometry.bytes_per_token),
            "host": host_boot_id(),
            "events": "{}/{}".format(*engine.events.identity),
            "attention": spell_attention(self._config.settings.attention),
        }
        while True:
            try:
                self._registration = await asyncio.to_thread(membership.join, role=self._config.role, address=self.address, info=info)
            except UnavailableError as error:
                log.warning("can't join the cluster yet: %s", error)
                await asyncio.sleep(_JOIN_RETRY_S)
            else:
                log.info("joined the cluster as a %s worker", self._config.role)  # its URL may hold a password
                return


async def serve(config: WorkerConfig, model: Model) -> None:
    """Run a worker until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    app = WorkerApp(config, model)
    try:
        await app.start()
        await stop.wait()
        log.info("stopping")
    finally:
        await app.stop()
