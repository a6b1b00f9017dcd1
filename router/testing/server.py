"""A whole router on a loopback socket, over scripted workers."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

from kvpool.clock import MonotonicClock
from kvpool.wire.guard import OPEN, Guard
from router.assemble import application, build_router
from router.feeds import Feeds
from router.fleet import ClusterView
from router.holdings import Index
from router.probe import PoolProbe
from router.server import Server, ServerTls
from router.services import Services
from router.settings import Limits
from router.stock.roster import EngineRoster
from router.testing.cluster import ScriptedCluster
from router.testing.pool import ScriptedPool
from router.text.model import TextModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A router that serves at `url`."""

    url: str
    services: Services


@contextlib.asynccontextmanager
async def serving(
    model: TextModel,
    cluster: ScriptedCluster | EngineRoster,
    *,
    limits: Limits | None = None,
    probe: PoolProbe | None = None,
    guard: Guard = OPEN,
    direct: bool = False,
    feed: Callable[[ClusterView, Index], Feeds] | None = None,
    attention_choices: frozenset[str] = frozenset(),
) -> AsyncIterator[Running]:
    """A router for the length of the block. Without `direct` every prompt, short as it may be, takes the long way by a prefill worker."""
    limits = limits or Limits()
    services = build_router(
        model=model,
        view=cluster,
        connect=cluster.connect,
        probe=probe or ScriptedPool(),
        limits=limits if direct else replace(limits, direct_tokens=0),
        clock=MonotonicClock(),
        guard=guard,
        feed=feed,
        attention_choices=attention_choices,
    )
    tls = ServerTls.of(guard.security)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = Server(application(services), drain_timeout_s=5, tls=tls)
        task = asyncio.ensure_future(server.serve(sockets=[bound]))
        waiting = asyncio.ensure_future(server.serving.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        try:
            yield Running(url=f"{'http' if tls is None else 'https'}://127.0.0.1:{bound.getsockname()[1]}", services=services)
        finally:
            waiting.cancel()
            server.should_exit = True
            await task
