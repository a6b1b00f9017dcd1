"""Membership in a Redis-compatible server, through the synchronous client on threads of our own.

Two kinds of threads, none of them shared with anything else, so that neither a busy event loop nor a slow reader delays a
heartbeat: one heartbeat thread with its own connection per registration, one watcher thread with its own connection per
membership. Every call on a connection has a timeout shorter than a lease; a call that fails is reported once when the
connection is lost and tried again at the next beat, on a fresh connection (`redis_link.py`, `redis_registration.py`).
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Self, cast

import redis

from kvpool.cluster.board import Board
from kvpool.cluster.config import ClusterConfig
from kvpool.cluster.member import MAX_INCARNATION, ROLES, Identity, Leased, Member, decode_record
from kvpool.cluster.membership import ConfigChange, ViewCallback, ViewPredicate
from kvpool.cluster.quarantine import REPORTING_ROLES
from kvpool.cluster.redis_keys import CONFIGURE, COUNTER_TTL_MS, JOIN, MAX_MEMBERS_PER_ROLE, Keys
from kvpool.cluster.redis_link import STORE_ERRORS, Link
from kvpool.cluster.redis_registration import RedisRegistration
from kvpool.cluster.url import ClusterUrl
from kvpool.errors import ClosedError, ProtocolError, UnavailableError

log = logging.getLogger(__name__)

CONFIGURE_TRIES = 16
CONFIGURE_TIMEOUT_S = 3.0
"""Of each call: somebody waits for the answer, and no lease depends on it."""


class RedisMembership:
    """See `Membership`."""

    def __init__(self, url: ClusterUrl) -> None:
        self._url = url
        self._keys = Keys(url.name)
        self._board = Board()
        self._link = Link(url)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._registrations: list[RedisRegistration] = []
        self._malformed = 0
        self._malformed_now: dict[str, bytes] = {}
        self._malformed_config = b""
        self.connected = True  # until the first look says otherwise, so that a loss is logged
        self._look()
        self._watcher = threading.Thread(target=self._watch, name=f"kvpool-watch-{url.name}", daemon=True)
        self._watcher.start()

    @property
    def malformed_records(self) -> int:
        """Records ignored because they broke a rule; each one counts once while it stays the same."""
        return self._malformed

    def join(self, *, role: str, address: str, id: str | None = None, info: dict[str, str] | None = None) -> RedisRegistration:
        """See `Membership.join`."""
        id = id or uuid.uuid4().hex
        info = dict(info or {})
        Member(role=role, id=id, incarnation=MAX_INCARNATION - 1, address=address, info=info)  # refuse before touching the store
        if self._stop.is_set():
            raise ClosedError("this membership is closed")
        link = Link(self._url)
        counter, now_ms = self._keys.counter(role, id), time.time_ns() // 1_000_000
        try:
            incarnation = int(link.call(lambda client: client.eval(JOIN, 1, counter, now_ms, COUNTER_TTL_MS)))
            member = Member(role=role, id=id, incarnation=incarnation, address=address, info=info)
            registration = RedisRegistration(self._url, member, link, lambda: self.config)
        except STORE_ERRORS as error:
            link.close()
            raise UnavailableError(f"can't join the cluster: the membership store {self._url.where} says: {error}") from error
        with self._lock:
            self._registrations.append(registration)
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
        link = Link(self._url, timeout_s=CONFIGURE_TIMEOUT_S)
        try:
            for _ in range(CONFIGURE_TRIES):
                stored = self._decode_config(link.call(lambda client: cast("bytes | None", client.get(self._keys.config))))
                base = max(stored or ClusterConfig(), self.config, key=lambda config: config.version)
                changed = change(base)
                if changed == base:
                    return base
                changed = replace(changed, version=base.version + 1)
                if link.call(lambda client: client.eval(CONFIGURE, 1, self._keys.config, base.version, changed.encode())):  # noqa: B023
                    self._board.learn(changed)
                    return changed
        except STORE_ERRORS as error:
            raise UnavailableError(f"can't change the config: the membership store {self._url.where} says: {error}") from error
        finally:
            link.close()
        raise UnavailableError(f"can't change the config: others changed it {CONFIGURE_TRIES} times meanwhile")

    def quarantined(self) -> frozenset[Identity]:
        """See `Membership.quarantined`."""
        return self._board.quarantined

    def report(self, role: str, id: str, incarnation: int, healthy: bool) -> bool:
        """See `Membership.report`."""
        with self._lock:
            reporters = [each for each in self._registrations if each.live and each.member.role in REPORTING_ROLES]
        return sum(each.report((role, id, incarnation), healthy=healthy) for each in reporters) > 0

    def subscribe(self, callback: ViewCallback) -> Callable[[], None]:
        """See `Membership.subscribe`."""
        return self._board.subscribe(callback)

    def close(self) -> None:
        """See `Membership.close`."""
        if self._stop.is_set():
            return
        self._stop.set()
        with self._lock:
            registrations = tuple(self._registrations)
        for registration in registrations:
            registration.close()
        if threading.current_thread() is not self._watcher:
            self._watcher.join(timeout=10)
        self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _watch(self) -> None:
        try:
            while not self._stop.wait(self._url.poll_s):
                self._look()
        finally:
            self._link.close()

    def _look(self) -> None:
        """One reading of the store; after a failure, or over a new connection, it is in doubt."""
        generation = self._link.generation
        try:
            (birth, config), records = self._link.call(self._read)
        except STORE_ERRORS as error:
            if self.connected:
                log.warning("the membership store %s can't be reached, the last view stays: %s", self._url.where, error)
            self.connected = False
            self._board.lost()
            return
        if self._link.generation != generation:
            self._board.lost()
        if not self.connected:
            log.info("the membership store %s is back", self._url.where)
        self.connected = True
        self._board.observe(self._decode(records), birth=birth.decode() if birth else None, config=self._decode_config(config))

    def _read(self, client: redis.Redis) -> "tuple[list[bytes | None], dict[str, bytes | None]]":
        """Two round trips: birth token, config and the ids of all roles, then all records at once."""
        pipe = client.pipeline(transaction=False)
        pipe.mget([self._keys.birth, self._keys.config])
        for role in ROLES:
            pipe.zrevrange(self._keys.role(role), 0, MAX_MEMBERS_PER_ROLE - 1)
        shared, *id_lists = pipe.execute()
        names = [self._keys.record(role, id.decode(errors="replace")) for role, ids in zip(ROLES, id_lists, strict=True) for id in ids]
        records = cast("list[bytes | None]", client.mget(names)) if names else []
        return shared, dict(zip(names, records, strict=True))

    def _decode_config(self, text: bytes | None) -> ClusterConfig | None:
        """The config, None when there is none or it is damaged: then the last known one stays, and heartbeats put it back."""
        if text is None:
            return None
        try:
            return ClusterConfig.decode(text)
        except ProtocolError as error:
            if text != self._malformed_config:
                self._malformed_config = text
                self._malformed += 1
                log.warning("ignored the malformed config %s: %s", self._keys.config, error)
            return None

    def _decode(self, records: dict[str, bytes | None]) -> list[Leased]:
        reading: list[Leased] = []
        malformed: dict[str, bytes] = {}
        for name, record in records.items():
            if record is None:
                continue
            try:
                leased = decode_record(record)
                if name != self._keys.record(leased.member.role, leased.member.id):
                    raise ProtocolError(f"it describes {leased.member.role} {leased.member.id}")
            except ProtocolError as error:
                malformed[name] = record
                if self._malformed_now.get(name) != record:
                    self._malformed += 1
                    log.warning("ignored the malformed membership record %s: %s", name, error)
            else:
                reading.append(leased)
        self._malformed_now = malformed
        return reading
