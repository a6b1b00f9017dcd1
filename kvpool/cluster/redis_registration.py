"""One member's place in a Redis-compatible store: a heartbeat thread with a connection of its own.

What the member says (its info, its reports) changes at once here and wakes the thread, which alone writes to the store; so
nobody who speaks ever waits for a server, and what can't be published now is published with the next beat that gets through.
"""

import logging
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace

from kvpool.clock import MonotonicClock
from kvpool.cluster.config import ClusterConfig
from kvpool.cluster.member import Identity, Leased, Member, encode_record
from kvpool.cluster.quarantine import Reports
from kvpool.cluster.redis_keys import COUNTER_TTL_MS, HEARTBEAT, LEAVE, Keys
from kvpool.cluster.redis_link import STORE_ERRORS, Link
from kvpool.cluster.url import ClusterUrl

log = logging.getLogger(__name__)


class RedisRegistration:
    """See `Registration`. Owns its heartbeat thread and that thread's connection."""

    def __init__(self, url: ClusterUrl, member: Member, link: Link, config: Callable[[], ClusterConfig]) -> None:
        """Publish `member` once, then keep it; `config` tells the last known. Raises one of `STORE_ERRORS`."""
        self._url = url
        self._member = member
        self._link = link
        self._config = config
        self._keys = Keys(url.name)
        self._clock = MonotonicClock()
        self._reports = Reports(url.lease_ms)
        self._said = threading.Lock()
        self._wake = threading.Event()
        self._stop = False
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

    @property
    def live(self) -> bool:
        """False once it was ended or superseded."""
        return not self._stop and not self.superseded

    def beat(self) -> None:
        """Renew the lease once, with what is to be said now. Raises one of `STORE_ERRORS`."""
        with self._said:
            member = self._member
            leased = Leased(member, self._url.lease_ms, self._reports.current(self._clock.now_ns()))
        config = self._config()
        keys = self._keys
        names = [keys.role(member.role), keys.record(member.role, member.id), keys.counter(member.role, member.id), keys.birth, keys.config]
        arguments: list[str | int] = [
            member.id,
            member.incarnation,
            encode_record(leased),
            self._url.lease_ms,
            COUNTER_TTL_MS,
            uuid.uuid4().hex,
        ]
        arguments += [config.version, config.encode()]
        if not self._link.call(lambda client: client.eval(HEARTBEAT, len(names), *names, *arguments)):
            self.superseded = True
            log.warning("%s %s was superseded: another process joined under the same id", member.role, member.id)

    def update(self, info: dict[str, str]) -> None:
        """See `Registration.update`."""
        with self._said:
            self._member = replace(self._member, info=dict(info))
        self._wake.set()

    def report(self, subject: Identity, *, healthy: bool) -> bool:
        """See `Membership.report`."""
        with self._said:
            now_ns = self._clock.now_ns()
            before = self._reports.current(now_ns)
            if healthy:
                self._reports.remove(subject)
            elif not self._reports.add(subject, now_ns):
                return False
            changed = self._reports.current(now_ns) != before
        if changed:
            self._wake.set()
        return True

    def close(self) -> None:
        """Leave; when the server can't be reached the lease runs out instead."""
        self._end(leave=True)

    def abandon(self) -> None:
        """Let the lease run out."""
        self._end(leave=False)

    def _end(self, *, leave: bool) -> None:
        if self._stop:
            return
        self._leave = leave
        self._stop = True
        self._wake.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            while self._pause() and not self.superseded:
                try:
                    self.beat()
                except STORE_ERRORS as error:
                    self._note(reachable=False, reason=str(error))
                else:
                    self._note(reachable=True)
            if self._leave and not self.superseded:
                self._say_goodbye()
        finally:
            self._link.close()

    def _pause(self) -> bool:
        """Wait for the next beat, or for something to say; False when it is time to stop."""
        self._wake.wait(self._url.beat_s)
        self._wake.clear()
        return not self._stop

    def _say_goodbye(self) -> None:
        member, keys = self._member, self._keys
        names = [keys.role(member.role), keys.record(member.role, member.id), keys.counter(member.role, member.id)]
        try:
            self._link.call(lambda client: client.eval(LEAVE, len(names), *names, member.id, member.incarnation))
        except STORE_ERRORS as error:
            log.warning("%s %s could not say goodbye, its lease will run out: %s", member.role, member.id, error)

    def _note(self, *, reachable: bool, reason: str = "") -> None:
        if reachable and not self._reachable:
            log.info("%s %s is published again", self._member.role, self._member.id)
        elif not reachable and self._reachable:
            log.warning("%s %s could not renew its lease: %s", self._member.role, self._member.id, reason)
        self._reachable = reachable
