"""WHO is alive: the Protocol every membership store implements, and `open_membership`, which picks one by URL.

A process joins under a role and an id and gets an incarnation; a heartbeat renews its lease; a process that leaves is
gone at once, one that crashes is gone when its lease runs out. Everybody holds a *view*: the members last known, read
without waiting. While the store can't be reached the view stays as it was (`connected` is False): nobody is evicted
because a store is down. When it is back, even emptied, heartbeats publish every member again, and a member counts as
gone only after it had a whole lease to do so. The same goes for the cluster's config and for who is in quarantine: read
without waiting, kept while the store is away, published again when it is back.

URLs::

    redis://[user:password@]host:port/0?cluster=NAME[&lease_ms=3000]     also unix://PATH[?db=0], and rediss:// (TLS, with
                                                                         ssl_ca_certs, ssl_certfile, ssl_keyfile)
    memory://NAME[?lease_ms=3000]                                        one process, for tests
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self
from urllib.parse import parse_qsl, urlencode, urlsplit

from kvpool.cluster.config import ClusterConfig
from kvpool.cluster.member import MAX_LEASE_MS, MIN_LEASE_MS, Identity, Member
from kvpool.errors import ConfigError

DEFAULT_LEASE_MS = 3000
BEATS_PER_LEASE = 3
"""A heartbeat every third of a lease: two may be lost before a live member is given up."""
POLLS_PER_LEASE = 10
_SERVER_OPTIONS = {"redis": {"db"}, "unix": {"db"}, "rediss": {"db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile"}}

ViewPredicate = Callable[[tuple[Member, ...]], bool]
ViewCallback = Callable[[tuple[Member, ...]], None]
ConfigChange = Callable[[ClusterConfig], ClusterConfig]

_NAME = re.compile(r"^[A-Za-z0-9._-]{1,64}$")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterUrl:
    """A parsed cluster URL. `server` is the store's own URL, without what concerns kvpool; empty for memory."""

    scheme: str
    name: str
    lease_ms: int
    server: str = ""

    @property
    def beat_s(self) -> float:
        """Seconds between two heartbeats."""
        return self.lease_ms / 1000 / BEATS_PER_LEASE

    @property
    def poll_s(self) -> float:
        """Seconds between two looks at the store."""
        return self.lease_ms / 1000 / POLLS_PER_LEASE


def parse_cluster_url(url: str) -> ClusterUrl:
    """Split a cluster URL (forms above). Raises `ConfigError` saying what is wrong with it."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    lease_text = query.pop("lease_ms", str(DEFAULT_LEASE_MS))
    if not lease_text.isdecimal() or not MIN_LEASE_MS <= int(lease_text) <= MAX_LEASE_MS:
        raise ConfigError(f"lease_ms in a cluster URL must be {MIN_LEASE_MS}..{MAX_LEASE_MS}, got {lease_text!r}")
    if parts.scheme == "memory":
        name, server = parts.netloc, ""
        if parts.path.strip("/") or query:
            raise ConfigError(f"an in-memory cluster URL is memory://NAME[?lease_ms=N], got {url!r}")
    elif parts.scheme in ("redis", "rediss", "unix"):
        name = query.pop("cluster", "default")
        unknown = set(query) - _SERVER_OPTIONS[parts.scheme]
        if unknown:
            raise ConfigError(f"unknown option in the cluster URL: {', '.join(sorted(unknown))}; cluster and lease_ms are known")
        server = parts._replace(query=urlencode(query)).geturl()
    else:
        raise ConfigError(f"a cluster URL starts with redis://, rediss://, unix:// or memory://, got {url!r}")
    if not _NAME.match(name):
        raise ConfigError(f"a cluster's name is 1..64 letters, digits, '.', '_' or '-', got {name!r} in {url!r}")
    return ClusterUrl(scheme=parts.scheme, name=name, lease_ms=int(lease_text), server=server)


def open_membership(url: str) -> Membership:
    """The membership of the cluster at `url`, with one look at the store already taken.

    When the store can't be reached the membership opens all the same, with `connected` False and an empty view, and keeps
    trying. Raises `ConfigError` for a bad URL.
    """
    parsed = parse_cluster_url(url)
    if parsed.scheme == "memory":
        from kvpool.cluster.memory import MemoryMembership

        return MemoryMembership(parsed)
    from kvpool.cluster.redis_store import RedisMembership  # imported here: redis-py takes a while to load

    return RedisMembership(parsed)
