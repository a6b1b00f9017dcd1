"""The Redis store keeps the membership contract against a real server, and survives what only real servers do."""

import logging
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.cluster import open_membership
from kvpool.errors import ConfigError
from kvpool.testing.faults_kit import FaultsKit
from kvpool.testing.membership_kit import ADDRESS, MembershipKit, Reporters, eventually, until
from kvpool.testing.redis_servers import SingleServer, plain_server
from kvpool.testing.redis_world import RedisWorld


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SingleServer]:
    with SingleServer(tmp_path_factory.mktemp("single")) as servers:
        yield servers


@pytest.fixture
def world(servers: SingleServer) -> Iterator[RedisWorld]:
    world = RedisWorld(servers)
    yield world
    world.close()


class TestRedisMembership(MembershipKit):
    pass


class TestRedisFaults(FaultsKit):
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
    with subprocess.Popen([sys.executable, "-c", _JOIN_AND_HANG, world.url], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            incarnation = int(process.stdout.readline())
            watching = world.open()
            (member,) = until(watching, lambda view: len(view) == 1)
            assert member.incarnation == incarnation
        finally:
            process.kill()
    until(watching, lambda view: len(view) == 0)


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
    with open_membership(world.deployment.url("other", 1000)) as other:
        assert other.connected
        assert other.members() == ()


def test_redis_nothing_is_left_behind_but_the_counter_with_an_expiry(world: RedisWorld) -> None:
    """Members that come and go don't fill the server: every key left either expires or is the one birth token."""
    here = world.open()
    registration = here.join(role="node", address=ADDRESS)
    registration.close()
    left = {key.decode() for key in world.client.keys(f"{{kvpool:{world.keys.name}}}:*") if isinstance(key, bytes)}
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


def test_redis_answer_of_a_server_that_is_behind_drops_nobody(world: RedisWorld) -> None:
    """A replica that took over may lack the latest members though it has the same birth token: a new connection is reason for doubt."""
    url = world.url.replace("lease_ms=1000", "lease_ms=8000")
    with open_membership(url) as here, open_membership(url) as there:
        registration = here.join(role="node", address=ADDRESS)
        until(there, lambda view: len(view) == 1)
        registration.abandon()
        pipe = world.client.pipeline(transaction=True)
        pipe.delete(world.keys.record("node", registration.member.id))
        pipe.zrem(world.keys.role("node"), registration.member.id)
        pipe.client_kill_filter(_type="normal", skipme=True)
        pipe.execute()
        late = here.join(role="router", address=ADDRESS)
        assert registration.member in until(there, lambda view: late.member in view)


def test_redis_through_a_socket_is_the_same_store(world: RedisWorld, tmp_path: Path) -> None:
    """On one machine no port is needed."""
    path = tmp_path / "s"
    server = plain_server(tmp_path, "socket", "--unixsocket", str(path))
    try:
        with open_membership(f"unix://{path}?cluster=a") as here, open_membership(f"redis://127.0.0.1:{server.port}?cluster=a") as there:
            registration = here.join(role="node", address=ADDRESS)
            assert until(there, lambda view: len(view) == 1) == (registration.member,)
    finally:
        server.kill()


def test_redis_url_with_unknown_option_is_a_config_error() -> None:
    """A typing mistake in the URL is reported, not ignored."""
    with pytest.raises(ConfigError):
        open_membership("redis://127.0.0.1:1/0?cluster=x&sokcet_timeout=3")


def test_redis_report_that_is_not_repeated_ends(world: RedisWorld) -> None:
    """A reporter that lives on and has nothing more to say of it doesn't stand by its word either."""
    cluster, there = Reporters(world, 2), world.open()
    assert cluster.report(1, healthy=False)
    eventually(lambda: len(there.quarantined()) == 1, "it is cut off")
    eventually(lambda: not there.quarantined(), "the report has run out")
