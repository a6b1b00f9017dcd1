"""The Redis store keeps the membership contract against a real server, and survives what only real servers do."""

import logging
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.cluster import Membership, open_membership
from kvpool.cluster.embedded import EmbeddedServer
from kvpool.cluster.membership import parse_cluster_url
from kvpool.cluster.redis_keys import Keys
from kvpool.cluster.redis_link import connect
from kvpool.errors import ConfigError
from kvpool.testing.membership_kit import ADDRESS, MembershipKit, eventually, until

LEASE_MS = 1500


class RedisWorld:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: list[Membership] = []
        self.server = EmbeddedServer.start(directory, cluster="test", lease_ms=LEASE_MS)
        self.client = connect(parse_cluster_url(self.server.url))
        self.keys = Keys("test")

    def open(self) -> Membership:
        membership = open_membership(self.server.url)
        self._open.append(membership)
        return membership

    def kill_store(self) -> None:
        self.server.kill()

    def restart_store(self) -> None:
        self.server = EmbeddedServer.start(self._directory, cluster="test", lease_ms=LEASE_MS, port=self.server.port)

    def write_record(self, role: str, id: str, record: str) -> None:
        self.client.set(self.keys.record(role, id), record)
        self.client.zadd(self.keys.role(role), {id: 2**53})

    def close(self) -> None:
        for membership in self._open:
            membership.close()
        self.client.close()
        self.server.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[RedisWorld]:
    world = RedisWorld(tmp_path)
    yield world
    world.close()


class TestRedisMembership(MembershipKit):
    pass


_JOIN_AND_HANG = """
import sys, time
from kvpool.cluster import open_membership
registration = open_membership(sys.argv[1]).join(role="node", address="127.0.0.1:7001")
print(registration.member.incarnation, flush=True)
time.sleep(600)
"""


def test_redis_member_killed_hard_leaves_the_view(world: RedisWorld) -> None:
    """The real thing: a process that joined and got `kill -9` is gone after its lease."""
    with subprocess.Popen([sys.executable, "-c", _JOIN_AND_HANG, world.server.url], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            incarnation = int(process.stdout.readline())
            watching = world.open()
            (member,) = until(watching, lambda view: len(view) == 1)
            assert member.incarnation == incarnation
        finally:
            process.kill()
    until(watching, lambda view: len(view) == 0)


def test_redis_flush_without_disconnect_drops_nobody(world: RedisWorld) -> None:
    """An emptied server is recognised by its birth token even when no connection broke."""
    here, there = world.open(), world.open()
    registration = here.join(role="node", address=ADDRESS)
    until(there, lambda view: len(view) == 1)
    sizes: list[int] = []
    there.subscribe(lambda view: sizes.append(len(view)))
    world.client.flushall()
    name = world.keys.record("node", registration.member.id)
    eventually(lambda: world.client.exists(name) == 1, "the heartbeat publishes the member again")
    late = here.join(role="router", address=ADDRESS)
    until(there, lambda view: late.member in view)
    assert min(sizes) == 1


def test_redis_paused_server_is_a_loss_and_ends_well(world: RedisWorld) -> None:
    """A server that accepts and never answers looks like a dead one, within a timeout, and costs no member when it goes on."""
    here, there = world.open(), world.open()
    here.join(role="node", address=ADDRESS)
    until(there, lambda view: len(view) == 1)
    sizes: list[int] = []
    there.subscribe(lambda view: sizes.append(len(view)))
    os.kill(world.server.pid, signal.SIGSTOP)
    try:
        eventually(lambda: not there.connected, "the silence is noticed")
    finally:
        os.kill(world.server.pid, signal.SIGCONT)
    eventually(lambda: there.connected, "the server is found again")
    late = here.join(role="router", address=ADDRESS)
    until(there, lambda view: late.member in view)
    assert min(sizes) == 1


def test_redis_paused_process_never_replaces_its_successor(world: RedisWorld) -> None:
    """A heartbeat of a lower incarnation is refused by the server itself."""
    here, there = world.open(), world.open()
    id = uuid.uuid4().hex
    old = here.join(role="node", id=id, address=ADDRESS)
    new = here.join(role="node", id=id, address="127.0.0.1:7002")
    old.beat()  # type: ignore[attr-defined]
    assert old.superseded
    until(there, lambda view: view == (new.member,))


def test_redis_clusters_in_one_server_are_apart(world: RedisWorld) -> None:
    """The name in the URL separates clusters that share a server."""
    here = world.open()
    here.join(role="node", address=ADDRESS)
    until(here, lambda view: len(view) == 1)
    with open_membership(world.server.url.replace("cluster=test", "cluster=other")) as other:
        assert other.connected
        assert other.members() == ()


def test_redis_nothing_is_left_behind_but_the_counter_with_an_expiry(world: RedisWorld) -> None:
    """Members that come and go don't fill the server: every key left either expires or is the one birth token."""
    here = world.open()
    registration = here.join(role="node", address=ADDRESS)
    registration.close()
    left = {key.decode() for key in world.client.keys("*") if isinstance(key, bytes)}
    counter = world.keys.counter("node", registration.member.id)
    assert left == {counter, world.keys.birth}
    assert world.client.pttl(counter) > 0


def test_redis_dead_ids_leave_the_role_set(world: RedisWorld) -> None:
    """The list of ids is pruned by the heartbeats of those alive, so crashed ids don't pile up."""
    here = world.open()
    world.client.zadd(world.keys.role("node"), {uuid.uuid4().hex: 1})
    registration = here.join(role="node", address=ADDRESS)
    assert world.client.zrange(world.keys.role("node"), 0, -1) == [registration.member.id.encode()]


def test_redis_record_under_a_foreign_key_is_malformed(world: RedisWorld) -> None:
    """A record must describe the member under whose key it stands, or one writer could appear as many."""
    here, there = world.open(), world.open()
    registration = here.join(role="node", address=ADDRESS)
    until(there, lambda view: len(view) == 1)
    record = world.client.get(world.keys.record("node", registration.member.id))
    assert isinstance(record, bytes)
    world.write_record("node", uuid.uuid4().hex, record.decode())
    eventually(lambda: there.malformed_records == 1, "the copy is refused")
    assert there.members() == (registration.member,)


def test_redis_unreachable_server_opens_disconnected_and_hides_the_password(caplog: pytest.LogCaptureFixture) -> None:
    """Opening doesn't fail with the store, and no secret reaches a log."""
    with caplog.at_level(logging.WARNING), open_membership("redis://user:s3cret@127.0.0.1:1/0?cluster=x&lease_ms=200") as membership:
        assert not membership.connected
        assert membership.members() == ()
    assert "127.0.0.1:1" in caplog.text
    assert "s3cret" not in caplog.text


def test_redis_connection_count_is_one_a_registration_and_one_a_watcher(world: RedisWorld) -> None:
    """Heartbeats share a connection with nobody, and nothing else is opened."""
    world.client.ping()
    before = len(world.client.client_list())
    here = world.open()
    here.join(role="node", address=ADDRESS)
    here.join(role="decode", address=ADDRESS)
    assert len(world.client.client_list()) == before + 3
    here.close()
    eventually(lambda: len(world.client.client_list()) == before, "all connections are closed again")


def test_redis_url_with_unknown_option_is_a_config_error() -> None:
    """A typing mistake in the URL is reported, not ignored."""
    with pytest.raises(ConfigError):
        open_membership("redis://127.0.0.1:1/0?cluster=x&sokcet_timeout=3")
