"""Puts the parts of one router together."""

import contextlib
import time
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette

from kvpool.clock import Clock
from kvpool.wire.guard import OPEN, Guard
from router.access import Access
from router.app import build_app
from router.decisions import Decisions
from router.dispatch import Dispatcher
from router.fleet import ClusterView, Fleet
from router.index import PrefixIndex
from router.metrics import Metrics
from router.probe import GuardedProbe, PoolProbe
from router.services import Services
from router.settings import Limits
from router.text.model import TextModel
from router.worker import WorkerPort


def build_router(
    *,
    model: TextModel,
    view: ClusterView,
    connect: Callable[[str], WorkerPort],
    probe: PoolProbe,
    limits: Limits,
    clock: Clock,
    guard: Guard = OPEN,
) -> Services:
    """The parts of one router, not yet following the cluster."""
    index = PrefixIndex(limits.index_blocks)
    fleet = Fleet(view, connect, model.name, clock, index.forget, limits)
    guarded = GuardedProbe(probe, clock, limits.pool_timeout_s)
    dispatcher = Dispatcher(fleet=fleet, index=index, probe=guarded, clock=clock, limits=limits)
    metrics = Metrics(fleet)
    return Services(
        model=model,
        dispatcher=dispatcher,
        metrics=metrics,
        limits=limits,
        clock=clock,
        access=Access(guard, clock),
        decisions=Decisions(clock),
        started_s=int(time.time()),
    )


def application(services: Services) -> Starlette:
    """The HTTP application; while it runs, the router follows the cluster."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        services.dispatcher.fleet.start()
        try:
            yield
        finally:
            await services.dispatcher.close()

    return build_app(services, lifespan)
