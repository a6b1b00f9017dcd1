"""Puts the parts of one router together."""

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping

from starlette.applications import Starlette

from kvpool.clock import Clock
from kvpool.cluster import Member
from kvpool.errors import ConfigError
from kvpool.policy.prefix import PrefixIndex
from kvpool.policy.routing import Policy, WorkerRef
from kvpool.policy.routing.names import OURS, make_policy
from kvpool.wire.guard import OPEN, Guard
from router.access import Access
from router.app import build_app
from router.choose import Chooser
from router.decisions import Decisions
from router.dispatch import Dispatcher
from router.feeds import Feeds
from router.fleet import ClusterView, Fleet
from router.holdings import Holdings, Index
from router.metrics import Metrics
from router.probe import GuardedProbe, PoolProbe
from router.queue.entrance import Entrance
from router.queue.prefetch import LeasePort, Prefetcher
from router.queue.slo import Forecast, Targets
from router.services import Services
from router.settings import Limits
from router.text.model import TextModel
from router.worker import ROLES, WorkerPort


def build_dispatcher(
    *,
    model: str,
    view: ClusterView,
    connect: Callable[[str], WorkerPort],
    probe: PoolProbe,
    limits: Limits,
    clock: Clock,
    decisions: Decisions | None = None,
    policy: str = OURS,
    seed: int = 0,
    lease: Callable[[Member], LeasePort] | None = None,
    feed: Callable[[ClusterView, Index], Feeds] | None = None,
) -> Dispatcher:
    """What carries jobs for the model called `model`, not yet following the cluster.

    `policy` is a name of `kvpool.policy.routing.names`, `seed` for those that draw. `lease` connects to pool nodes for what is fetched for
    those who wait (None: nothing is). `feed` makes what fills the index with what the view's members tell of their blocks (None: nothing
    does, the pool is asked instead). Raises `ConfigError`: no such policy.
    """
    index = PrefixIndex[WorkerRef](limits.index_blocks)
    feeds = feed(view, index) if feed is not None else None
    holdings = Holdings(index, view, GuardedProbe(probe, clock, limits.pool_timeout_s), feeds)
    fleet = Fleet(view, connect, model, clock, lambda ref: chooser.forget(ref), limits)
    chooser = Chooser(
        fleet=fleet,
        holdings=holdings,
        policies=_policies(policy, seed),
        decisions=decisions or Decisions(clock),
        clock=clock,
    )
    entrance = Entrance(
        fleet=fleet,
        holdings=holdings,
        chooser=chooser,
        prefetcher=Prefetcher(view, lease or _no_lease, limits.prefetch_tokens if lease is not None else 0),
        forecast=Forecast(Targets(ttft_s=limits.slo_ttft_s, tpot_s=limits.slo_tpot_s), clock),
        clock=clock,
        limits=limits,
    )
    return Dispatcher(fleet=fleet, holdings=holdings, chooser=chooser, entrance=entrance, clock=clock, limits=limits)


def _policies(name: str, seed: int) -> Mapping[str, Policy]:
    """One for each role; ours is the same for all, since its decode workers help with prefills."""
    return dict.fromkeys(ROLES, make_policy(name, seed)) if name == OURS else {role: make_policy(name, seed) for role in ROLES}


def _no_lease(node: Member) -> LeasePort:
    raise ConfigError("nothing is to be fetched for those who wait")


def build_router(
    *,
    model: TextModel,
    view: ClusterView,
    connect: Callable[[str], WorkerPort],
    probe: PoolProbe,
    limits: Limits,
    clock: Clock,
    guard: Guard = OPEN,
    policy: str = OURS,
    seed: int = 0,
    lease: Callable[[Member], LeasePort] | None = None,
    feed: Callable[[ClusterView, Index], Feeds] | None = None,
    attention_choices: frozenset[str] = frozenset(),
) -> Services:
    """The parts of one router, not yet following the cluster. As for `build_dispatcher`."""
    decisions = Decisions(clock)
    dispatcher = build_dispatcher(
        model=model.name,
        view=view,
        connect=connect,
        probe=probe,
        limits=limits,
        clock=clock,
        decisions=decisions,
        policy=policy,
        seed=seed,
        lease=lease,
        feed=feed,
    )
    return Services(
        model=model,
        dispatcher=dispatcher,
        metrics=Metrics(dispatcher),
        limits=limits,
        clock=clock,
        attention_choices=attention_choices,
        access=Access(guard, clock, limits.key_requests_per_s),
        decisions=decisions,
        started_s=int(time.time()),
    )


def application(services: Services) -> Starlette:
    """The HTTP application; while it runs, the router follows the cluster."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        services.dispatcher.start()
        try:
            yield
        finally:
            await services.dispatcher.close()

    return build_app(services, lifespan)
