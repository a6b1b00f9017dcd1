"""The contract in a Redis Cluster of three nodes, whose second holds the records, and what only such a cluster does."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.crc import key_slot

from kvpool.cluster import open_membership
from kvpool.errors import UnavailableError
from kvpool.testing.faults_kit import FaultsKit, Scene
from kvpool.testing.membership_kit import ADDRESS, MembershipKit, eventually, until
from kvpool.testing.redis_servers import RedisClusterServers, Server, wait_for
from kvpool.testing.redis_world import RedisWorld


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisClusterServers]:
    with RedisClusterServers(tmp_path_factory.mktemp("cluster")) as servers:
        yield servers


@pytest.fixture
def world(servers: RedisClusterServers) -> Iterator[RedisWorld]:
    world = RedisWorld(servers)
    yield world
    world.close()


class TestRedisClusterMembership(MembershipKit):
    pass


class TestRedisClusterFaults(FaultsKit):
    pass


def test_redis_cluster_keys_of_a_cluster_share_one_slot(world: RedisWorld) -> None:
    """What makes scripts and one connection enough: whatever is stored lies on one node."""
    keys = world.keys
    names = [keys.birth, keys.config, keys.role("node"), keys.record("node", "f" * 32), keys.counter("node", "f" * 32)]
    assert len({key_slot(name.encode()) for name in names}) == 1


def test_redis_cluster_slot_that_moves_to_another_node_takes_the_members_along(world: RedisWorld, servers: RedisClusterServers) -> None:
    """Resharding while it runs: clients follow the MOVED, nobody is dropped."""
    scene = Scene(world)
    slot = key_slot(world.keys.birth.encode())
    _move(slot, servers.servers[1], servers.servers[2], servers)
    try:
        with servers.servers[2].client() as target:
            record = world.keys.record(*scene.nodes.registrations[1].member.identity[:2])
            target.delete(record)
            eventually(lambda: target.exists(record) == 1, "a heartbeat publishes the member on the other node")
        late = world.open().join(role="router", address=ADDRESS)
        until(scene.watcher, lambda view: late.member in view)
        assert scene.configs() == {scene.config}
        assert all(scene.members <= members for members, _, _ in scene.views)
    finally:
        _move(slot, servers.servers[2], servers.servers[1], servers)


def test_redis_cluster_failover_keeps_all_members_and_the_config(tmp_path: Path) -> None:
    """The node with the records dies and its replica is elected: two leases later it has everything, and nobody was dropped."""
    with RedisClusterServers(tmp_path, replica=True) as servers:
        replica = servers.servers[3]
        world = RedisWorld(servers)
        try:
            scene = Scene(world)
            servers.holder.kill()
            eventually(scene.lost, "everybody notices")
            with replica.client() as client:
                wait_for(lambda: client.info("replication")["role"] == "master", "the replica is elected")
                wait_for(lambda: client.cluster("INFO")["cluster_state"] == "ok", "the cluster is well again")
            scene.check_settles(time.monotonic())
        finally:
            world.close()


def test_redis_cluster_found_through_any_node_that_lives(servers: RedisClusterServers) -> None:
    """Each node of the URL is as good as the other; a port where nobody listens is passed over."""
    name = servers.new_name()
    for server in servers.servers:
        with open_membership(f"redis+cluster://127.0.0.1:9,127.0.0.1:{server.port}?cluster={name}&lease_ms=1000") as membership:
            assert membership.connected


def test_redis_cluster_taken_for_a_single_server_says_where_to_go(servers: RedisClusterServers) -> None:
    """A redis:// URL of a node that doesn't hold the records isn't followed, but the message tells."""
    name = servers.new_name()
    with open_membership(f"redis://127.0.0.1:{servers.servers[0].port}/0?cluster={name}&lease_ms=1000") as membership:
        assert not membership.connected
        with pytest.raises(UnavailableError, match=r"redis\+cluster://"):
            membership.join(role="node", address=ADDRESS)


def _move(slot: int, source: Server, target: Server, servers: RedisClusterServers) -> None:
    """What `valkey-cli --cluster reshard` does for one slot."""
    with source.client() as giver, target.client() as taker:
        ids = [client.execute_command("CLUSTER MYID").decode() for client in (giver, taker)]
        taker.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
        giver.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
        while keys := giver.execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
            giver.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
        for client in (taker, giver):
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])
    for server in servers.servers:
        if server not in (source, target):
            with server.client() as client:
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])
