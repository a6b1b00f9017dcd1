"""The door itself: connections, their TLS, deadlines and limits. What commands do is in `commands.py`.

Each connection is a task that reads, does what came in order, and answers. It reads no further while commands or answers wait, so a long
pipeline waits in the client's socket. Every wait ends: for a handshake, for AUTH, for the rest of a command, for the client to take an
answer, for a next command.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import Any, Final

from kvpool.clock import Clock
from kvpool.errors import ConfigError, LimitError
from kvpool.node.resp.budget import Budget
from kvpool.node.resp.commands import Session
from kvpool.node.resp.connection import Connection, Waits
from kvpool.node.resp.protocol import Limits, error
from kvpool.node.resp.store import ValueStore
from kvpool.policy.rates import Rates
from kvpool.request.pool import NodeDescription
from kvpool.security.principal import ANYBODY, Principal
from kvpool.security.tls import server_context
from kvpool.units import MS
from kvpool.wire.guard import Guard

log = logging.getLogger(__name__)

_BACKLOG: Final = 128
_STOP_S: Final = 5.0
_STRANGER: Final = Limits(words=8, word_bytes=1024, all_bytes=4096)
"""What a client may say before it is known who it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RespLimits:
    """Of a door. `in_hand_bytes`: of large commands and answers of all connections together."""

    connections: int = 256
    value_bytes: int = 128 << 20
    words: int = 65_536
    in_hand_bytes: int = 512 << 20
    waits: Waits = field(default_factory=Waits)


class RespServer:
    """`await start(listen)`, then `address` is where it listens; `await stop()` ends all connections."""

    def __init__(
        self, store: ValueStore, guard: Guard, rates: Rates, clock: Clock, describe: Callable[[], NodeDescription], limits: RespLimits
    ) -> None:
        self.store = store
        self.asks = guard.tokens is not None
        self.address = ""
        self.counters = dict.fromkeys(("resp_connections", "resp_turned_away", "resp_commands", "resp_cut"), 0)
        self._guard = guard
        self._rates = rates
        self._clock = clock
        self._describe = describe
        self._limits = limits
        self._full = Limits(words=limits.words, word_bytes=limits.value_bytes, all_bytes=limits.value_bytes + (1 << 20))
        self._budget = Budget(limits.in_hand_bytes, limits.waits.budget_s)
        self._tls: Callable[[], SSLContext] | None = None
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._open: dict[asyncio.Task[None], asyncio.Transport | None] = {}

    async def start(self, listen: str) -> None:
        """Listen at host:port (port 0: any free one). Raises `ConfigError`."""
        self._guard.check_listen(listen)
        security = self._guard.security
        if security.tls_cert is not None and security.tls_key is not None:
            self._tls = server_context(security.tls_cert, security.tls_key, security.tls_ca, mutual=security.mutual)
        host, _, port = listen.rpartition(":")
        try:
            self._socket = socket.create_server((host.strip("[]"), int(port)), family=_family(host), backlog=_BACKLOG)
        except (OSError, ValueError, OverflowError) as failure:
            raise ConfigError(f"the RESP door can't listen at {listen}: {failure}; choose another --resp-port") from None
        self._socket.setblocking(False)
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        self._accepting = asyncio.create_task(self._accept(self._socket))

    async def stop(self) -> None:
        """Commands that are being done are waited for (bounded)."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
        for task, transport in self._open.items():
            if transport is None:
                task.cancel()
            else:
                transport.abort()
        if self._open:
            _, left = await asyncio.wait(self._open, timeout=_STOP_S)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    @property
    def connected(self) -> int:
        """Open connections."""
        return len(self._open)

    @property
    def in_hand_bytes(self) -> int:
        """Bytes of large commands and answers that are under way."""
        return self._limits.in_hand_bytes - self._budget.left

    # What sessions need of it

    def known(self, token: str) -> Principal:
        """See `Door.known`."""
        return ANYBODY if self._guard.tokens is None else self._guard.tokens.principal(token)

    def salt(self, principal: Principal) -> bytes:
        """See `Door.salt`."""
        return self._guard.salt_of(principal.tenant)

    def admit(self, tenant: str) -> None:
        """See `Door.admit`."""
        wait_ns = self._rates.admit(tenant, self._clock.now_ns())
        if wait_ns:
            raise LimitError(f"tenant {tenant} is above its rate; try again in {max(1, wait_ns // MS)} ms")

    def info(self, principal: Principal) -> str:
        """See `Door.info`. A tenant is shown no books."""
        said = self._describe()
        lines = ["# Server", "server_name:kvpool", "redis_mode:standalone", f"node_id:{said.node_id}", f"incarnation:{said.incarnation}"]
        lines += ["# Memory", f"maxmemory:{said.capacity_bytes}"]
        if principal.tenant is None:
            lines += [f"used_memory:{said.capacity_bytes - said.free_bytes}", "# Clients", f"connected_clients:{self.connected}"]
            lines += ["# Stats", *(f"{name}:{count}" for name, count in said.counters.items())]
        return "\r\n".join(lines) + "\r\n"

    # Connections

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listening)
            except OSError as failure:  # out of descriptors, or gone again
                log.warning("a RESP connection can't be accepted: %s", failure)
                await asyncio.sleep(0.1)
                continue
            if len(self._open) >= self._limits.connections:
                self.counters["resp_turned_away"] += 1
                if self._tls is None:
                    client.setblocking(False)
                    _try_send(client, error("max number of clients reached"))
                client.close()
                continue
            self.counters["resp_connections"] += 1
            task = asyncio.create_task(self._serve(client))
            self._open[task] = None
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.pop(task, None)
        if not task.cancelled() and (failure := task.exception()) is not None:
            log.error("a RESP connection failed", exc_info=failure)

    async def _serve(self, client: socket.socket) -> None:
        """One connection, from its handshake to its end."""
        loop, waits = asyncio.get_running_loop(), self._limits.waits
        connection = Connection(self._budget, waits, _STRANGER if self.asks else self._full)
        tls: dict[str, Any] = {} if self._tls is None else {"ssl": self._tls(), "ssl_handshake_timeout": waits.stranger_s}
        try:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets it for sockets that it made itself
            transport, _ = await loop.connect_accepted_socket(lambda: connection.protocol, client, **tls)
        except OSError as failure:  # ssl.SSLError is one
            client.close()
            log.debug("a RESP client's handshake failed: %s", failure)
            return
        task = asyncio.current_task()
        if task is not None:
            self._open[task] = transport
        session = Session(self, connection.send, connection.charge)
        try:
            await connection.open(transport)
            async for words in connection.commands(lambda: session.known):
                self.counters["resp_commands"] += 1
                await session.run(words)
                if session.known:
                    connection.limit(self._full)
                if session.over:
                    break
            await connection.close()
        except (OSError, EOFError) as failure:  # TimeoutError is one
            self.counters["resp_cut"] += 1
            log.debug("a RESP connection ended: %s", failure)
        finally:
            await connection.abort()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _try_send(client: socket.socket, data: bytes) -> None:
    try:
        client.send(data)
    except OSError as failure:
        log.debug("a client that is turned away isn't told why: %s", failure)
