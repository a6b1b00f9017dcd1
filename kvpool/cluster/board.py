"""The notice board of one membership: one thread posts views, any thread reads, waits or subscribes."""

import logging
import threading
from collections.abc import Callable, Iterable

from kvpool.clock import Clock, MonotonicClock
from kvpool.cluster.config import ClusterConfig
from kvpool.cluster.member import ROLES, Identity, Leased, Member
from kvpool.cluster.membership import ViewCallback, ViewPredicate
from kvpool.cluster.view import View
from kvpool.errors import ClosedError, ConfigError, DeadlineError
from kvpool.units import SECOND

log = logging.getLogger(__name__)


class Board:
    """Shares a `View` between threads. Callbacks run in order of the changes, one at a time, outside the view's lock."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._view = View()
        self._changed = threading.Condition()
        self._delivery = threading.RLock()
        self._callbacks: dict[int, ViewCallback] = {}
        self._next_callback = 0
        self._closed = False

    @property
    def config(self) -> ClusterConfig:
        """The config last known."""
        return self._view.config

    @property
    def quarantined(self) -> frozenset[Identity]:
        """Members that most others can't reach."""
        return self._view.quarantined

    def learn(self, config: ClusterConfig) -> None:
        """This process has changed the config; subscribers hear of it with the next reading."""
        with self._changed:
            self._view.learn(config)
            self._changed.notify_all()

    def observe(self, reading: Iterable[Leased], *, birth: str | None, config: ClusterConfig | None) -> None:
        """Post one complete reading of the store and tell subscribers and waiters if anything changed."""
        with self._delivery:
            with self._changed:
                if not self._view.observe(reading, birth=birth, config=config, now_ns=self._clock.now_ns()):
                    return
                members = self._view.members
                self._changed.notify_all()
            for callback in tuple(self._callbacks.values()):
                _deliver(callback, members)

    def lost(self) -> None:
        """The store could not be read: the view stays."""
        with self._changed:
            self._view.lost()

    def members(self, role: str | None = None) -> tuple[Member, ...]:
        """The view now, of one role or all."""
        if role is not None and role not in ROLES:
            raise ConfigError(f"role must be one of {', '.join(ROLES)}, got {role!r}")
        members = self._view.members  # one reference, replaced as a whole: no lock needed
        return members if role is None else tuple(member for member in members if member.role == role)

    def wait(self, predicate: ViewPredicate, deadline_ns: int) -> tuple[Member, ...]:
        """See `Membership.wait`. Raises `ClosedError` when the board closes meanwhile."""
        with self._changed:
            while True:
                members = self._view.members
                if predicate(members):
                    return members
                if self._closed:
                    raise ClosedError("the membership was closed while waiting for a change")
                left_ns = deadline_ns - self._clock.now_ns()
                if left_ns <= 0:
                    here = ", ".join(f"{member.role} {member.id[:8]}" for member in members) or "nobody"
                    raise DeadlineError(f"the cluster did not come to the awaited state in time; members: {here}")
                self._changed.wait(left_ns / SECOND)

    def subscribe(self, callback: ViewCallback) -> Callable[[], None]:
        """See `Membership.subscribe`."""
        with self._delivery:
            number = self._next_callback
            self._next_callback += 1
            self._callbacks[number] = callback
            _deliver(callback, self._view.members)

        def unsubscribe() -> None:
            self._callbacks.pop(number, None)

        return unsubscribe

    def close(self) -> None:
        """Wake all waiters and forget all subscribers."""
        with self._changed:
            self._closed = True
            self._callbacks.clear()
            self._changed.notify_all()


def _deliver(callback: ViewCallback, members: tuple[Member, ...]) -> None:
    """One subscriber's mistake must not keep the others, or the watcher, from the news."""
    try:
        callback(members)
    except Exception:
        log.exception("a membership subscriber failed and missed a view of %d members", len(members))
