"""One router's part in a group of routers: its reports served, those of the others heard."""

import grpc.aio

from kvpool.clock import Clock
from kvpool.wire.guard import Guard
from kvpool.wire.router_client import RouterRpc
from kvpool.wire.router_server import add_loads
from router.fleet import ClusterView, Fleet
from router.queue.shared import SharedWork
from router.replicas.peers import Peers, Reports

_STOP_S = 0.5


class Replicas:
    """`await start(...)`, then it tells and hears until `await close()`."""

    def __init__(self, view: ClusterView, fleet: Fleet, shared: SharedWork, guard: Guard, clock: Clock) -> None:
        self._guard = guard
        self._reports = Reports(fleet, shared)
        self._peers = Peers(view, fleet, shared, lambda address: RouterRpc(address, guard.security), clock)
        self._server: grpc.aio.Server | None = None

    @property
    def heard(self) -> int:
        """Routers whose reports are known."""
        return self._peers.heard

    async def start(self, host: str, port: int, advertise: str) -> str:
        """Listen at `host` and `port` (0: any free one); where others, who reach `advertise`, find the reports. Raises `ConfigError`."""
        self._server = self._guard.server()
        add_loads(self._server, self._reports)
        bound = self._guard.bind(self._server, f"{_spelled(host)}:{port}")
        await self._server.start()
        address = f"{_spelled(advertise)}:{bound.rpartition(':')[2]}"
        self._peers.start(address)
        return address

    async def close(self) -> None:
        """Neither tell nor hear any more."""
        await self._peers.close()
        if self._server is not None:
            await self._server.stop(grace=_STOP_S)


def _spelled(host: str) -> str:
    return f"[{host}]" if ":" in host else host
