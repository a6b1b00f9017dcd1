"""Membership in a Redis-compatible server, through the synchronous client on threads of our own.

Two kinds of threads, none of them shared with anything else, so that neither a busy event loop nor a slow reader delays a
heartbeat: one heartbeat thread with its own connection per registration, one watcher thread with its own connection per
membership. Every call on a connection has a timeout shorter than a lease; a call that fails is reported once when the
connection is lost and tried again at the next beat, on a fresh connection.
"""

import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Self, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvpool.cluster.board import Board
from kvpool.cluster.member import MAX_INCARNATION, ROLES, Member, decode_record, encode_record
from kvpool.cluster.membership import ClusterUrl, ViewCallback, ViewPredicate
from kvpool.cluster.redis_keys import COUNTER_TTL_MS, HEARTBEAT, LEAVE, MAX_MEMBERS_PER_ROLE, Keys
from kvpool.cluster.view import Leased
from kvpool.errors import ClosedError, ConfigError, ProtocolError, UnavailableError

log = logging.getLogger(__name__)

_STORE_ERRORS = (redis.RedisError, OSError)


def connect(url: ClusterUrl) -> redis.Redis:
    """A client with one connection, timeouts below the lease, and one immediate retry. Raises `ConfigError` for a bad URL."""
    timeout_s = min(1.0, url.lease_ms / 1000 / 3)
    try:
        return redis.Redis.from_url(
            url.server,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 1),  # a server that was restarted between two calls costs nothing
            max_connections=2,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"bad cluster URL {url.server!r}: {error}") from error


class RedisRegistration:
    """See `Registration`. Owns its heartbeat thread and that thread's connection."""

    def __init__(self, url: ClusterUrl, member: Member, client: redis.Redis) -> None:
        self._url = url
        self._member = member
        self._client = client
        self._keys = Keys(url.name)
        self._record = encode_record(member, lease_ms=url.lease_ms)
        self._heartbeat = client.register_script(HEARTBEAT)
        self._stop = threading.Event()
        self._leave = False
        self._reachable = True
        self.superseded = False
        self.beat()
        self._thread = threading.Thread(target=self._run, name=f"kvpool-heartbeat-{member.role}", daemon=True)
        self._thread.start()

    @property
    def member(self) -> Member:
        """What the others see."""
        return self._member

    def beat(self) -> None:
        """Renew the lease once. Raises redis-py's errors."""
        member, keys = self._member, self._keys
        names = [keys.role(member.role), keys.record(member.role, member.id), keys.counter(member.role, member.id), keys.birth]
        arguments: list[str | int] = [member.id, member.incarnation, self._record, self._url.lease_ms, COUNTER_TTL_MS, uuid.uuid4().hex]
        if not self._heartbeat(keys=names, args=arguments):
            self.superseded = True
            log.warning("%s %s was superseded: another process joined under the same id", member.role, member.id)

    def close(self) -> None:
        """Leave; when the server can't be reached the lease runs out instead."""
        self._end(leave=True)

    def abandon(self) -> None:
        """Let the lease run out."""
        self._end(leave=False)

    def _end(self, *, leave: bool) -> None:
        if self._stop.is_set():
            return
        self._leave = leave
        self._stop.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._url.beat_s) and not self.superseded:
                try:
                    self.beat()
                except _STORE_ERRORS as error:
                    self._note(reachable=False, reason=str(error))
                else:
                    self._note(reachable=True)
            if self._leave and not self.superseded:
                self._say_goodbye()
        finally:
            self._client.close()

    def _say_goodbye(self) -> None:
        member, keys = self._member, self._keys
        names = [keys.role(member.role), keys.record(member.role, member.id), keys.counter(member.role, member.id)]
        try:
            self._client.register_script(LEAVE)(keys=names, args=[member.id, member.incarnation])
        except _STORE_ERRORS as error:
            log.warning("%s %s could not say goodbye, its lease will run out: %s", member.role, member.id, error)

    def _note(self, *, reachable: bool, reason: str = "") -> None:
        if reachable and not self._reachable:
            log.info("%s %s is published again", self._member.role, self._member.id)
        elif not reachable and self._reachable:
            log.warning("%s %s could not renew its lease: %s", self._member.role, self._member.id, reason)
        self._reachable = reachable


class RedisMembership:
    """See `Membership`."""

    def __init__(self, url: ClusterUrl) -> None:
        self._url = url
        self._keys = Keys(url.name)
        self._board = Board()
        self._client = connect(url)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._registrations: list[RedisRegistration] = []
        self._malformed = 0
        self._malformed_now: dict[str, bytes] = {}
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
        client = connect(self._url)
        try:
            counter = self._keys.counter(role, id)
            pipe = client.pipeline(transaction=True)
            pipe.set(counter, time.time_ns() // 1_000_000, nx=True)
            pipe.incr(counter)
            pipe.pexpire(counter, COUNTER_TTL_MS)
            incarnation = int(pipe.execute()[1])
            member = Member(role=role, id=id, incarnation=incarnation, address=address, info=info)
            registration = RedisRegistration(self._url, member, client)
        except _STORE_ERRORS as error:
            client.close()
            raise UnavailableError(f"can't join the cluster: the membership store {self._where()} says: {error}") from error
        with self._lock:
            self._registrations.append(registration)
        return registration

    def members(self, role: str | None = None) -> tuple[Member, ...]:
        """See `Membership.members`."""
        return self._board.members(role)

    def wait(self, predicate: ViewPredicate, deadline_ns: int) -> tuple[Member, ...]:
        """See `Membership.wait`."""
        return self._board.wait(predicate, deadline_ns)

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

    def _where(self) -> str:
        """The server's address without its password, for messages."""
        return self._url.server.rsplit("@", 1)[-1].removeprefix(f"{self._url.scheme}://")

    def _watch(self) -> None:
        try:
            while not self._stop.wait(self._url.poll_s):
                self._look()
        finally:
            self._client.close()

    def _look(self) -> None:
        """One reading of the store: the birth token and the ids of all roles, then all records at once."""
        try:
            pipe = self._client.pipeline(transaction=False)
            pipe.get(self._keys.birth)
            for role in ROLES:
                pipe.zrange(self._keys.role(role), 0, MAX_MEMBERS_PER_ROLE - 1, desc=True)
            birth, *id_lists = pipe.execute()
            names = [self._keys.record(role, id.decode(errors="replace")) for role, ids in zip(ROLES, id_lists, strict=True) for id in ids]
            records = cast("list[bytes | None]", self._client.mget(names)) if names else []
        except _STORE_ERRORS as error:
            if self.connected:
                log.warning("the membership store %s can't be reached, the last view stays: %s", self._where(), error)
            self.connected = False
            self._board.lost()
            return
        if not self.connected:
            log.info("the membership store %s is back", self._where())
        self.connected = True
        self._board.observe(self._decode(dict(zip(names, records, strict=True))), birth=birth.decode() if birth else None)

    def _decode(self, records: dict[str, bytes | None]) -> list[Leased]:
        reading: list[Leased] = []
        malformed: dict[str, bytes] = {}
        for name, record in records.items():
            if record is None:
                continue
            try:
                member, lease_ms = decode_record(record)
                if name != self._keys.record(member.role, member.id):
                    raise ProtocolError(f"it describes {member.role} {member.id}")
            except ProtocolError as error:
                malformed[name] = record
                if self._malformed_now.get(name) != record:
                    self._malformed += 1
                    log.warning("ignored the malformed membership record %s: %s", name, error)
            else:
                reading.append((member, lease_ms))
        self._malformed_now = malformed
        return reading
