"""The in-memory twin of a membership store: one store per name and process, for tests and single-process set-ups.

It keeps the contract of the Redis store, leases and outages included; a live registration needs no heartbeat thread here, so
its lease runs only from the moment it is abandoned. `MemoryStore` also lets a test take the store down and bring it back.
"""

import itertools
import logging
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Self

from kvpool.clock import MonotonicClock
from kvpool.cluster.board import Board
from kvpool.cluster.config import ClusterConfig
from kvpool.cluster.member import MAX_INCARNATION, Identity, Leased, Member, decode_record
from kvpool.cluster.membership import ConfigChange, ViewCallback, ViewPredicate
from kvpool.cluster.quarantine import REPORTING_ROLES, Reports
from kvpool.cluster.url import ClusterUrl
from kvpool.errors import ClosedError, ProtocolError, UnavailableError
from kvpool.units import MS, SECOND

log = logging.getLogger(__name__)

_INCARNATIONS = itertools.count(1)
"""Shared by all stores of the process, so that an id never sees one twice, whatever stores come and go."""


class MemoryStore:
    """The records of one cluster name, and a switch to make it unreachable."""

    _stores: dict[str, "MemoryStore"] = {}  # noqa: RUF012 - process-wide on purpose
    _stores_lock = threading.Lock()

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.version = 0
        self.reachable = True
        self.birth = uuid.uuid4().hex
        self.users = 0
        self.raw: dict[str, str] = {}
        """Records as text, as a stranger might write them; only tests do."""
        self.live: dict[tuple[str, str], MemoryRegistration] = {}
        self.config: ClusterConfig | None = None

    @classmethod
    def named(cls, name: str) -> "MemoryStore":
        """The store called `name`, made on first use and dropped when its last user closes."""
        with cls._stores_lock:
            return cls._stores.setdefault(name, cls())

    def enter(self) -> None:
        """One more membership uses this store."""
        with self._stores_lock:
            self.users += 1

    def leave(self, name: str) -> None:
        """One membership less."""
        with self._stores_lock:
            self.users -= 1
            if self.users == 0:
                self._stores.pop(name, None)

    def go_down(self) -> None:
        """Become unreachable, as a killed server."""
        self._set(reachable=False)

    def come_back(self, *, emptied: bool) -> None:
        """Become reachable again; `emptied`: as a server without persistence that was restarted."""
        with self.changed:
            if emptied:
                self.birth = uuid.uuid4().hex
                self.raw.clear()
                self.config = None
                self.live = {key: entry for key, entry in self.live.items() if entry.expires_ns is None}
        self._set(reachable=True)

    def _set(self, *, reachable: bool) -> None:
        with self.changed:
            self.reachable = reachable
            self.touch()

    def write_config(self, text: str) -> None:
        """As a stranger might; nonsense is as good as none."""
        with self.changed:
            try:
                self.config = ClusterConfig.decode(text)
            except ProtocolError:
                self.config = None
            self.touch()

    def put_back(self, config: ClusterConfig) -> None:
        """Remember `config` unless a version as high is known; the caller holds `changed`."""
        if self.config is None or self.config.version < config.version:
            self.config = config
            self.touch()

    def touch(self) -> None:
        """Wake every watcher; the caller holds `changed`."""
        self.version += 1
        self.changed.notify_all()

    def expire(self, now_ns: int) -> int | None:
        """Drop what has run out; the next expiry, if any. The caller holds `changed`."""
        self.live = {key: entry for key, entry in self.live.items() if entry.expires_ns is None or entry.expires_ns > now_ns}
        return min((entry.expires_ns for entry in self.live.values() if entry.expires_ns is not None), default=None)


class MemoryRegistration:
    """See `Registration`."""

    def __init__(self, store: MemoryStore, member: Member, lease_ms: int) -> None:
        self._store = store
        self._member = member
        self._reports = Reports(lease_ms)
        self._stopped = False
        self.lease_ms = lease_ms
        self.expires_ns: int | None = None
        self.superseded = False

    @property
    def member(self) -> Member:
        """What the others see."""
        return self._member

    @property
    def live(self) -> bool:
        """False once it was ended or superseded."""
        return not self._stopped and not self.superseded

    def leased(self, now_ns: int) -> Leased:
        """What stands in the store; the caller holds its lock."""
        return Leased(self._member, self.lease_ms, self._reports.current(now_ns))

    def update(self, info: dict[str, str]) -> None:
        """See `Registration.update`."""
        with self._store.changed:
            self._member = replace(self._member, info=dict(info))
            self._store.touch()

    def report(self, subject: Identity, *, healthy: bool) -> bool:
        """See `Membership.report`."""
        with self._store.changed:
            if healthy:
                self._reports.remove(subject)
            elif not self._reports.add(subject, MonotonicClock().now_ns()):
                return False
            self._store.touch()
            return True

    def close(self) -> None:
        """Leave at once."""
        self._stop(leave=True)

    def abandon(self) -> None:
        """Let the lease run out."""
        self._stop(leave=False)

    def _stop(self, *, leave: bool) -> None:
        key = self._member.role, self._member.id
        with self._store.changed:
            if self._stopped or self._store.live.get(key) is not self:
                return
            self._stopped = True
            if leave and self._store.reachable:
                del self._store.live[key]
            else:
                self.expires_ns = MonotonicClock().now_ns() + self.lease_ms * MS
            self._store.touch()


class MemoryMembership:
    """See `Membership`."""

    def __init__(self, url: ClusterUrl) -> None:
        self._url = url
        self._clock = MonotonicClock()
        self._board = Board(self._clock)
        self._store = MemoryStore.named(url.name)
        self._store.enter()
        self._closed = False
        self._registrations: list[MemoryRegistration] = []
        self._malformed = 0
        self._seen_malformed: set[str] = set()
        self.connected = False
        self._look()
        self._watcher = threading.Thread(target=self._watch, name=f"kvpool-watch-{url.name}", daemon=True)
        self._watcher.start()

    @property
    def malformed_records(self) -> int:
        """Records ignored because they broke a rule; each one counts once."""
        return self._malformed

    def join(self, *, role: str, address: str, id: str | None = None, info: dict[str, str] | None = None) -> MemoryRegistration:
        """See `Membership.join`."""
        first = Member(role=role, id=id or uuid.uuid4().hex, incarnation=MAX_INCARNATION - 1, address=address, info=dict(info or {}))
        with self._store.changed:
            if self._closed:
                raise ClosedError("this membership is closed")
            if not self._store.reachable:
                raise UnavailableError(f"the membership store {self._url.where} can't be reached")
            member = Member(role=role, id=first.id, incarnation=next(_INCARNATIONS), address=address, info=first.info)
            registration = MemoryRegistration(self._store, member, self._url.lease_ms)
            before = self._store.live.get((role, member.id))
            if before is not None:
                before.superseded = True
            self._store.live[role, member.id] = registration
            self._registrations.append(registration)
            self._store.touch()
        return registration

    def members(self, role: str | None = None) -> tuple[Member, ...]:
        """See `Membership.members`."""
        return self._board.members(role)

    def wait(self, predicate: ViewPredicate, deadline_ns: int) -> tuple[Member, ...]:
        """See `Membership.wait`."""
        return self._board.wait(predicate, deadline_ns)

    @property
    def config(self) -> ClusterConfig:
        """See `Membership.config`."""
        return self._board.config

    def configure(self, change: ConfigChange) -> ClusterConfig:
        """See `Membership.configure`."""
        with self._store.changed:
            if not self._store.reachable:
                raise UnavailableError(f"the membership store {self._url.where} can't be reached")
            base = max(self._store.config or ClusterConfig(), self.config, key=lambda config: config.version)
            changed = change(base)
            if changed == base:
                return base
            self._store.config = replace(changed, version=base.version + 1)
            self._board.learn(self._store.config)
            self._store.touch()
            return self._store.config

    def quarantined(self) -> frozenset[Identity]:
        """See `Membership.quarantined`."""
        return self._board.quarantined

    def report(self, role: str, id: str, incarnation: int, healthy: bool) -> bool:
        """See `Membership.report`."""
        reporters = [each for each in self._registrations if each.live and each.member.role in REPORTING_ROLES]
        return sum(each.report((role, id, incarnation), healthy=healthy) for each in reporters) > 0

    def subscribe(self, callback: ViewCallback) -> Callable[[], None]:
        """See `Membership.subscribe`."""
        return self._board.subscribe(callback)

    def close(self) -> None:
        """See `Membership.close`."""
        with self._store.changed:
            if self._closed:
                return
            self._closed = True
            self._store.touch()
        for registration in self._registrations:
            registration.close()
        if threading.current_thread() is not self._watcher:
            self._watcher.join(timeout=5)
        self._board.close()
        self._store.leave(self._url.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _watch(self) -> None:
        version = -1
        while True:
            with self._store.changed:
                next_expiry_ns = self._store.expire(self._clock.now_ns())
                if self._closed:
                    return
                if self._store.version == version:
                    left_s = self._url.poll_s
                    if next_expiry_ns is not None:
                        left_s = min(left_s, max(0.0, (next_expiry_ns - self._clock.now_ns()) / SECOND))
                    self._store.changed.wait(left_s)
                version = self._store.version
            self._look()

    def _look(self) -> None:
        with self._store.changed:
            self._store.expire(self._clock.now_ns())
            reachable, birth, raw = self._store.reachable, self._store.birth, dict(self._store.raw)
            reading = [entry.leased(self._clock.now_ns()) for entry in self._store.live.values()]
            if reachable and self.config.version > 0 and any(each.live for each in self._registrations):
                self._store.put_back(self.config)
            config = self._store.config
        self.connected = reachable
        if not reachable:
            self._board.lost()
            return
        for key, text in raw.items():
            try:
                reading.append(decode_record(text))
            except ProtocolError as error:
                if key not in self._seen_malformed:
                    self._seen_malformed.add(key)
                    self._malformed += 1
                    log.warning("ignored the malformed membership record %s: %s", key, error)
        self._board.observe(reading, birth=birth, config=config)
