"""A `MembershipWorld` on a real store: one cluster with a name of its own among others in the same servers."""

from typing import Any

from kvpool.cluster import Membership, open_membership
from kvpool.cluster.redis_keys import Keys
from kvpool.testing.redis_servers import Deployment

LEASE_MS = 1000


class RedisWorld:
    """See `MembershipWorld`. `client` is the test's own connection to the server with the records, as the default user."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        name = deployment.new_name()
        self.url = deployment.url(name, LEASE_MS)
        self.lease_s = LEASE_MS / 1000
        self.keys = Keys(name)
        self.client = deployment.holder.client()
        self._open: list[Membership] = []
        self._killed = False

    def open(self) -> Membership:
        """See `MembershipWorld`."""
        self._open.append(open_membership(self.url))
        return self._open[-1]

    def kill_store(self) -> None:
        """See `MembershipWorld`."""
        self.deployment.holder.kill()
        self._killed = True

    def restart_store(self) -> None:
        """See `MembershipWorld`."""
        self.deployment.restart()
        self._killed = False

    def pause_store(self) -> None:
        """See `MembershipWorld`."""
        self.deployment.holder.pause()

    def resume_store(self) -> None:
        """See `MembershipWorld`."""
        self.deployment.holder.resume()

    def empty_store(self) -> None:
        """See `MembershipWorld`."""
        self.client.flushall()

    def write_record(self, role: str, id: str, record: str) -> None:
        """See `MembershipWorld`."""
        self.client.set(self.keys.record(role, id), record)
        self.client.zadd(self.keys.role(role), {id: 2**53})

    def write_config(self, text: str) -> None:
        """See `MembershipWorld`."""
        self.client.set(self.keys.config, text)

    def stored_config(self) -> Any:
        """What stands in the store."""
        return self.client.get(self.keys.config)

    def close(self) -> None:
        """Leave the servers as they were found: up, and with nobody of this cluster in them."""
        self.deployment.holder.resume()
        if self._killed:
            self.deployment.restart()
        for membership in self._open:
            membership.close()
        self.client.close()
