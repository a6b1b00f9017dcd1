"""The contract behind Sentinel, and a failover: the master dies, a replica takes over, and no member notices more than a pause."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.cluster import open_membership
from kvpool.errors import UnavailableError
from kvpool.testing.faults_kit import FaultsKit, Scene
from kvpool.testing.membership_kit import ADDRESS, MembershipKit, eventually, until
from kvpool.testing.redis_servers import SentinelServers, wait_for
from kvpool.testing.redis_world import RedisWorld


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelServers]:
    with SentinelServers(tmp_path_factory.mktemp("sentinel")) as servers:
        yield servers


@pytest.fixture
def world(servers: SentinelServers) -> Iterator[RedisWorld]:
    world = RedisWorld(servers)
    yield world
    world.close()


class TestSentinelMembership(MembershipKit):
    pass


class TestSentinelFaults(FaultsKit):
    pass


@pytest.fixture
def failover(tmp_path: Path) -> Iterator[SentinelServers]:
    """A master with a replica, and three sentinels that may replace the one by the other."""
    with SentinelServers(tmp_path, replicas=1, sentinels=3) as servers:
        yield servers


def test_sentinel_failover_keeps_all_members_and_the_config(failover: SentinelServers) -> None:
    """From the death of the master to two leases after the new one is known: nobody is dropped, and heartbeats go to the new master."""
    world = RedisWorld(failover)
    scene = Scene(world)
    failover.holder.kill()
    try:
        eventually(scene.lost, "everybody notices")
        wait_for(lambda: failover.master_port() == failover.servers[1].port, "a replica is promoted")
        with failover.servers[1].client() as replica:
            wait_for(lambda: replica.info("replication")["role"] == "master", "the replica is master")
            back_s = time.monotonic()
            scene.check_settles(back_s)
            record = world.keys.record(*scene.nodes.registrations[1].member.identity[:2])
            replica.delete(record)
            eventually(lambda: replica.exists(record) == 1, "a heartbeat publishes the member on the new master")
        failover.holder.start()  # it comes back empty and takes itself for a master until the sentinels tell it otherwise
        late = world.open().join(role="router", address=ADDRESS)
        until(scene.watcher, lambda view: late.member in view)
        assert all(scene.members <= members for members, _, _ in scene.views)
    finally:
        world.close()


def test_sentinel_that_is_dead_or_hung_is_passed_over(tmp_path: Path) -> None:
    """One helpful sentinel is enough, and the others cost no more than one timeout between them."""
    with SentinelServers(tmp_path, sentinels=3) as three:
        three.sentinels[0].kill()
        three.sentinels[1].pause()
        with open_membership(three.url(three.new_name(), 1000)) as membership:
            assert membership.connected
            membership.join(role="node", address=ADDRESS)
            three.sentinels[2].kill()
            until(membership, lambda view: len(view) == 1)
            with pytest.raises(UnavailableError):
                membership.join(role="node", address=ADDRESS)
            assert membership.connected  # who has found the master needs no sentinel until it moves


def test_sentinel_without_such_a_master_says_so(servers: SentinelServers) -> None:
    """A typing mistake in the service is visible in the error."""
    with open_membership(servers.url("a", 1000).replace("/main", "/mian")) as membership:
        assert not membership.connected
        with pytest.raises(UnavailableError, match="knows no master 'mian'"):
            membership.join(role="node", address=ADDRESS)


def test_sentinel_with_a_user_of_its_own(servers: SentinelServers) -> None:
    """Sentinels and servers have users apart; one of the first that may do nothing but tell the master is enough."""
    with servers.sentinels[0].client() as sentinel:
        rights = "resetchannels -@all +sentinel|get-master-addr-by-name"
        sentinel.execute_command("ACL", "SETUSER", "finder", "on", ">s3cret", *rights.split())
        sentinel.execute_command("ACL", "SETUSER", "default", "off")
    url = servers.url(servers.new_name(), 1000)
    try:
        with open_membership(url) as refused, open_membership(f"{url}&sentinel_username=finder&sentinel_password=s3cret") as membership:
            assert not refused.connected
            assert membership.connected
    finally:
        servers.sentinels[0].kill()
        servers.sentinels[0].start()
