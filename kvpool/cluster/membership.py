"""WHO is alive: the Protocol every membership store implements, and `open_membership`, which picks one by URL.

A process joins under a role and an id and gets an incarnation; a heartbeat renews its lease; a process that leaves is
gone at once, one that crashes is gone when its lease runs out. Everybody holds a *view*: the members last known, read
without waiting. While the store can't be reached the view stays as it was (`connected` is False): nobody is evicted
because a store is down. When it is back, even emptied, heartbeats publish every member again, and a member counts as
gone only after it had a whole lease to do so. The same goes for the cluster's config and for who is in quarantine: read
without waiting, kept while the store is away, published again when it is back. URLs stand in `kvpool/cluster/url.py`.
"""

from collections.abc import Callable
from typing import Protocol, Self

from kvpool.cluster.config import ClusterConfig
from kvpool.cluster.member import Identity, Member
from kvpool.cluster.url import parse_cluster_url

ViewPredicate = Callable[[tuple[Member, ...]], bool]
ViewCallback = Callable[[tuple[Member, ...]], None]
ConfigChange = Callable[[ClusterConfig], ClusterConfig]


class Registration(Protocol):
    """This process's place in the cluster, kept alive by a thread of its own."""

    @property
    def member(self) -> Member:
        """What the others see."""
        ...

    @property
    def superseded(self) -> bool:
        """True once another process has joined under the same role and id: this one is no member any more."""
        ...

    def update(self, info: dict[str, str]) -> None:
        """Say something else about itself from now on, under the same incarnation; `info` replaces the former one.

        Doesn't wait: it is published at once, or as soon as the store can be reached, and with every heartbeat after that.
        Raises `ConfigError` when `info` is too large.
        """
        ...

    def close(self) -> None:
        """Leave: the others see it within one poll. A second call does nothing."""
        ...

    def abandon(self) -> None:
        """Stop the heartbeat without leaving, as a crash would: the others see it when the lease runs out."""
        ...


class Membership(Protocol):
    """A cluster's members as this process knows them. Every method may be called from any thread."""

    @property
    def connected(self) -> bool:
        """False while the store can't be reached; the view is then the last one known."""
        ...

    @property
    def malformed_records(self) -> int:
        """Records ignored since opening because they broke a rule."""
        ...

    def join(self, *, role: str, address: str, id: str | None = None, info: dict[str, str] | None = None) -> Registration:
        """Become a member with a new incarnation, higher than any before under this id (a fresh UUID by default).

        Raises `ConfigError` for a bad argument and `UnavailableError` when the store can't be reached.
        """
        ...

    def members(self, role: str | None = None) -> tuple[Member, ...]:
        """The view, of one role or all, ordered by role and id. Never blocks."""
        ...

    def wait(self, predicate: ViewPredicate, deadline_ns: int) -> tuple[Member, ...]:
        """Block until `predicate(members())` holds and return that view; `DeadlineError` past the monotonic `deadline_ns`."""
        ...

    @property
    def config(self) -> ClusterConfig:
        """The cluster's config last known, the defaults before the first change. Never blocks."""
        ...

    def configure(self, change: ConfigChange) -> ClusterConfig:
        """Replace the config by `change` of the newest one, as its next version, and return what holds now.

        `change` is called again when somebody else was faster, and may raise. A result equal to what was given changes nothing.
        Raises `UnavailableError` when the store can't be reached, or when others were faster again and again.
        """
        ...

    def quarantined(self) -> frozenset[Identity]:
        """Role, id and incarnation of members that more than half of the others that may report do report. Never blocks."""
        ...

    def report(self, role: str, id: str, incarnation: int, healthy: bool) -> bool:
        """Say that this process can't reach that member on the data path, or can again. Doesn't wait.

        A report lasts two leases; repeat it while it is true. It is made in the name of every node and worker that joined here;
        False when there is none, or when it already reports 64 others: then nothing was reported.
        """
        ...

    def subscribe(self, callback: ViewCallback) -> Callable[[], None]:
        """Call `callback` with the view now, on this thread, and after every change of the members, the quarantine or
        the config, in order, on a thread of the membership.

        Returns a function that ends the subscription. The callback must not block.
        """
        ...

    def close(self) -> None:
        """Leave with every registration made here and stop all threads. The view stays readable."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


def open_membership(url: str) -> Membership:
    """The membership of the cluster at `url`, with one look at the store already taken.

    When the store can't be reached the membership opens all the same, with `connected` False and an empty view, and keeps
    trying. Raises `ConfigError` for a bad URL.
    """
    parsed = parse_cluster_url(url)
    if parsed.kind == "memory":
        from kvpool.cluster.memory import MemoryMembership

        return MemoryMembership(parsed)
    from kvpool.cluster.redis_store import RedisMembership  # imported here: redis-py takes a while to load

    return RedisMembership(parsed)
