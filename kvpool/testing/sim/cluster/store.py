"""The membership store and how a process knows it: the real `View`, `Reports` and `ClusterConfig` over a simulated server.

Theory. The server obeys the rules of the scripts in `kvpool.cluster.redis_keys`: a heartbeat of a lower incarnation is refused, a record
goes when its lease runs out, the first heartbeat after an emptying writes a new birth token, and a config goes back only over a lower
version.
A process polls it and beats as `RedisMembership` and `RedisRegistration` do, at the same fractions of the lease.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvpool.cluster.config import ClusterConfig
from kvpool.cluster.member import Identity, Leased, Member
from kvpool.cluster.membership import ConfigChange, ViewCallback, ViewPredicate
from kvpool.cluster.quarantine import Reports
from kvpool.cluster.url import BEATS_PER_LEASE, POLLS_PER_LEASE
from kvpool.cluster.view import View
from kvpool.errors import ConfigError, UnavailableError
from kvpool.testing.sim.cluster.vloop import Process, VirtualLoop
from kvpool.testing.sim.cluster.wire import STORE, Network
from kvpool.units import MS, SECOND

Reading = tuple[str | None, ClusterConfig | None, list[Leased], int]
"""Birth token, config, who has a lease, and how often the server was started: a connection doesn't outlive it."""


class Store:
    """The server. `up`: it answers."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.up = True
        self.config: ClusterConfig | None = None
        self.forgetful_ns = 0
        """When it last came back, perhaps without those whose leases had run out."""
        self._starts = 0
        self._loop = loop
        self._records: dict[tuple[str, str], tuple[Leased, int]] = {}
        self._counters: dict[tuple[str, str], int] = {}
        self._births = 0
        self._birth: str | None = None

    def stop(self) -> None:
        """Answer nobody."""
        self.up = False
        self.forgetful_ns = self._loop.now_ns

    def start(self) -> None:
        """Answer again; leases have run on meanwhile."""
        self._starts += not self.up
        self.forgetful_ns = self._loop.now_ns
        self.up = True

    def empty(self) -> None:
        """Forget everything, as a server without persistence that was restarted."""
        self._records.clear()
        self._counters.clear()
        self._birth = self.config = None

    def join(self, role: str, id: str) -> int:
        """The next incarnation; counters begin at the wall clock, so that they grow over an emptying too."""
        self._counters[role, id] = max(self._counters.get((role, id), 0), 1_700_000_000_000 + self._loop.now_ns // MS) + 1
        return self._counters[role, id]

    def beat(self, leased: Leased, config: ClusterConfig) -> bool:
        """Renew a lease; False when a higher incarnation exists."""
        member = leased.member
        key = member.role, member.id
        if self._counters.get(key, 0) > member.incarnation:
            return False
        self._counters[key] = member.incarnation
        self._records[key] = leased, self._loop.now_ns + leased.lease_ms * MS
        if self._birth is None:
            self._births += 1
            self._birth = f"birth {self._births}"
        if config.version > (self.config.version if self.config is not None else 0):
            self.config = config
        return True

    def leave(self, member: Member) -> None:
        """Remove a record unless a higher incarnation wrote it."""
        if self._counters.get((member.role, member.id), 0) <= member.incarnation:
            self._records.pop((member.role, member.id), None)

    def read(self) -> Reading:
        """One look."""
        now_ns = self._loop.now_ns
        return self._birth, self.config, [leased for leased, until_ns in self._records.values() if until_ns > now_ns], self._starts

    def configure(self, change: ConfigChange, known: ClusterConfig) -> ClusterConfig:
        """Compare and set."""
        base = max(self.config or ClusterConfig(), known, key=lambda config: config.version)
        changed = change(base)
        if changed != base:
            self.config = changed = replace(changed, version=base.version + 1)
        return changed


class SimRegistration:
    """See `Registration`."""

    def __init__(self, membership: "SimMembership", member: Member) -> None:
        self.member = member
        self.superseded = False
        self.stopped = False
        self.flying = False
        """A call to the store is under way."""
        self.hasty = False
        """There is something new to say after it."""
        self.reports = Reports(membership.lease_ms)
        self._membership = membership

    def update(self, info: dict[str, str]) -> None:
        """See `Registration.update`."""
        self.member = replace(self.member, info=dict(info))
        self._membership.beat(self)

    def close(self) -> None:
        """See `Registration.close`."""
        if not self.stopped:
            self.stopped = True
            self._membership.beat(self)

    def abandon(self) -> None:
        """See `Registration.abandon`."""
        self.stopped = True


class SimMembership:
    """See `Membership`. `watch` is told of every look: (this membership, what was read, None when the store could not be reached)."""

    malformed_records = 0

    def __init__(
        self, process: Process, store: Store, network: Network, lease_ms: int, watch: "Callable[[SimMembership, Reading | None], None]"
    ) -> None:
        self.process = process
        self.lease_ms = lease_ms
        self.connected = True
        self.view = View()
        self.registrations: list[SimRegistration] = []
        self._starts = 0
        self._store = store
        self._network = network
        self._watch = watch
        self._loop = network.loop
        if self._reaches_store():
            self._seen(store.read())  # opening takes one look and waits for it
        else:
            self._lost()

    @property
    def config(self) -> ClusterConfig:
        """See `Membership.config`."""
        return self.view.config

    def members(self, role: str | None = None) -> tuple[Member, ...]:
        """See `Membership.members`."""
        return tuple(member for member in self.view.members if role is None or member.role == role)

    def quarantined(self) -> frozenset[Identity]:
        """See `Membership.quarantined`."""
        return self.view.quarantined

    def join(self, *, role: str, address: str, id: str | None = None, info: dict[str, str] | None = None) -> SimRegistration:
        """See `Membership.join`."""
        assert id is not None
        self._require_store()
        incarnation = self._store.join(role, id)
        registration = SimRegistration(self, Member(role=role, id=id, incarnation=incarnation, address=address, info=dict(info or {})))
        self.registrations.append(registration)
        self._store.beat(self._leased(registration), self.config)
        self._again(self._beats, registration, self.lease_ms // BEATS_PER_LEASE)
        return registration

    def report(self, role: str, id: str, incarnation: int, healthy: bool) -> bool:
        """See `Membership.report`."""
        made = 0
        for registration in self.registrations:
            if registration.stopped or registration.superseded:
                continue
            before = registration.reports.current(self._loop.now_ns)
            if healthy:
                registration.reports.remove((role, id, incarnation))
            elif not registration.reports.add((role, id, incarnation), self._loop.now_ns):
                continue
            made += 1
            if registration.reports.current(self._loop.now_ns) != before:
                self.beat(registration)
        return made > 0

    def configure(self, change: ConfigChange) -> ClusterConfig:
        """See `Membership.configure`."""
        self._require_store()
        config = self._store.configure(change, self.config)
        self.view.learn(config)
        return config

    def configure_soon(self, change: ConfigChange) -> None:
        """`configure` from a thread that nobody waits for."""
        self._loop.run_in_executor(None, self._try_configure, change)

    def _try_configure(self, change: ConfigChange) -> None:
        if self._reaches_store():
            self.configure(change)

    def wait(self, predicate: ViewPredicate, deadline_ns: int) -> tuple[Member, ...]:
        """Nobody waits in virtual time."""
        raise ConfigError("a simulated membership can't be waited for; look at its members")

    def subscribe(self, callback: ViewCallback) -> Callable[[], None]:
        """Nobody subscribes in virtual time."""
        raise ConfigError("a simulated membership tells nobody; look at its members")

    def close(self) -> None:
        """See `Membership.close`."""
        for registration in self.registrations:
            registration.close()

    def __enter__(self) -> "SimMembership":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def beat(self, registration: SimRegistration) -> None:
        """Say now what is to be said; one call after the other."""
        if registration.flying:
            registration.hasty = True
            return
        registration.flying, registration.hasty = True, False
        leased, config, leaving = self._leased(registration), self.config, registration.stopped

        def told(taken: bool) -> None:
            registration.superseded = registration.superseded or not (leaving or taken)
            over()

        def over() -> None:
            registration.flying = False
            if registration.hasty and not registration.superseded:
                self.beat(registration)

        act: Callable[[Store], Any] = (lambda store: store.leave(leased.member)) if leaving else (lambda store: store.beat(leased, config))
        self.send(act, told, over)

    def send(self, act: Callable[[Store], Any], then: Callable[[Any], None], otherwise: Callable[[], None]) -> None:
        """Do something at the store and hear of it here, or of its failure once the call's time is over."""
        there_ns = self._network.delay_ns(self.process, None, STORE)
        done = [False]

        def over() -> None:
            if not done[0]:
                done[0] = True
                otherwise()

        def heard(answer: Any) -> None:
            if not done[0]:
                done[0] = True
                then(answer)

        def arrive() -> None:
            if self._store.up:
                answer = act(self._store)
                if self._network.passes(STORE, self.process.name):
                    self._loop.call_later(there_ns / SECOND, heard, answer, context=context)  # type: ignore[operator]

        context = self.process.context
        self._loop.call_later(min(1.0, self.lease_ms / 3000), over, context=context)
        if there_ns is not None:
            self._loop.later(there_ns, arrive)

    def _look(self, _: None = None) -> None:
        self.send(lambda store: store.read(), self._seen, self._lost)

    def _seen(self, reading: Reading) -> None:
        birth, config, entries, starts = reading
        if starts != self._starts:
            self.view.lost()
        self.connected, self._starts = True, starts
        self.view.observe(entries, birth=birth, config=config, now_ns=self._loop.now_ns)
        self._watch(self, reading)
        self._again(self._look, None, self.lease_ms // POLLS_PER_LEASE)

    def _lost(self) -> None:
        self.connected = False
        self.view.lost()
        self._watch(self, None)
        self._again(self._look, None, self.lease_ms // POLLS_PER_LEASE)

    def _beats(self, registration: SimRegistration) -> None:
        if not registration.stopped and not registration.superseded:
            self.beat(registration)
            self._again(self._beats, registration, self.lease_ms // BEATS_PER_LEASE)

    def _again(self, action: Callable[[Any], None], argument: Any, after_ms: int) -> None:
        self._loop.call_later(after_ms / 1000, action, argument, context=self.process.context)

    def _leased(self, registration: SimRegistration) -> Leased:
        return Leased(registration.member, self.lease_ms, registration.reports.current(self._loop.now_ns))

    def _reaches_store(self) -> bool:
        name, passes = self.process.name, self._network.passes
        return self._store.up and passes(name, STORE) and passes(STORE, name)

    def _require_store(self) -> None:
        if not self._reaches_store():
            self._loop.owe_until(self._loop.now_ns + self.lease_ms * MS // 3)
            raise UnavailableError("the membership store can't be reached")
