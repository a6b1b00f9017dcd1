"""The contract over TLS with client certificates, as a user with no more rights than kvpool needs; and what is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvpool.cluster import open_membership
from kvpool.errors import ConfigError, UnavailableError
from kvpool.testing.certificates import Authority, Pair
from kvpool.testing.faults_kit import FaultsKit
from kvpool.testing.membership_kit import ADDRESS, MembershipKit, eventually, until
from kvpool.testing.redis_servers import RedisClusterServers, SentinelServers, SingleServer
from kvpool.testing.redis_world import RedisWorld
from kvpool.testing.tls_front import TlsFront

RIGHTS = "~{kvpool:*}:* resetchannels -@all +get +mget +set +del +incr +pexpire +zadd +zrevrange +zrem +zremrangebyscore +time +eval"
"""What docs/cluster.md says that a user of kvpool needs."""
PASSWORD = "p@ss/word"
LOGIN = "kvpool:p%40ss%2Fword@"


class Vault(NamedTuple):
    """An authority and what it signed."""

    authority: Authority
    server: Pair
    client: Pair

    def options(self, **changes: str) -> str:
        """TLS options of a URL."""
        files = {"ssl_ca_certs": str(self.authority.cert), "ssl_certfile": str(self.client.cert), "ssl_keyfile": str(self.client.key)}
        return "".join(f"&{name}={value}" for name, value in (files | changes).items())


@pytest.fixture(scope="module")
def vault(tmp_path_factory: pytest.TempPathFactory) -> Vault:
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    return Vault(authority, authority.sign("server"), authority.sign("client"))


@pytest.fixture(scope="module")
def front(vault: Vault) -> Iterator[TlsFront]:
    front = TlsFront(vault.server.cert, vault.server.key, ca=vault.authority.cert)
    yield front
    front.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, vault: Vault, front: TlsFront) -> Iterator[SingleServer]:
    user = ("--user", *f"kvpool on >{PASSWORD} {RIGHTS}".split())
    with SingleServer(
        tmp_path_factory.mktemp("secured"), *user, front_of=front.front_of, login=LOGIN, tls_options=vault.options()
    ) as servers:
        yield servers


@pytest.fixture
def world(servers: SingleServer) -> Iterator[RedisWorld]:
    world = RedisWorld(servers)
    yield world
    world.close()


class TestSecuredMembership(MembershipKit):
    pass


class TestSecuredFaults(FaultsKit):
    pass


def test_secured_connections_are_all_tls_and_all_of_the_user(world: RedisWorld, servers: SingleServer, front: TlsFront) -> None:
    """Heartbeats and watcher alike: nothing goes around the front, and nobody is the default user but the test itself."""
    front.secure.clear()
    here = world.open()
    here.join(role="node", address=ADDRESS)
    assert front.secure[servers.holder.port] == 2
    assert front.plain[servers.holder.port] == 0
    assert sorted(client["user"] for client in world.client.client_list()) == ["default", "kvpool", "kvpool"]


@pytest.mark.parametrize(("old", "new"), [("p%40ss", "wrong"), ("kvpool:", "nobody:")], ids=["password", "user"])
def test_secured_store_refuses_a_wrong_login(world: RedisWorld, old: str, new: str) -> None:
    """It is no store at all to a stranger; the error says so at the first join, without the password."""
    url = world.url.replace(old, new)
    with open_membership(url) as membership:
        assert not membership.connected
        with pytest.raises(UnavailableError) as refused:
            membership.join(role="node", address=ADDRESS)
    assert "p@ss" not in str(refused.value)
    assert "p%40ss" not in str(refused.value)


def test_secured_password_in_a_file_may_change_while_it_runs(world: RedisWorld, tmp_path: Path) -> None:
    """The file is read at each connection; one that can't be read at the start is a mistake."""
    file = tmp_path / "password"
    url = world.url.replace(":p%40ss%2Fword@", "@") + f"&password_file={file}"
    with pytest.raises(ConfigError, match="password_file"):
        open_membership(url)
    file.write_text("not it")
    with open_membership(url) as membership:
        assert not membership.connected
        file.write_text(f"{PASSWORD}\n")
        eventually(lambda: membership.connected, "the new password is used")


def test_secured_store_is_not_believed_without_a_certificate_that_fits(
    servers: SingleServer, vault: Vault, front: TlsFront, tmp_path: Path
) -> None:
    """Another authority's server is a stranger, and so is one under another name; a client that shows nothing is one to the server."""
    stranger = Authority(tmp_path, "stranger")
    url = servers.url(servers.new_name(), 1000)
    strange = url.replace(str(vault.authority.cert), str(stranger.cert))
    silent = url.replace(f"&ssl_certfile={vault.client.cert}&ssl_keyfile={vault.client.key}", "")
    elsewhere = TlsFront(*_files(vault.authority.sign("elsewhere", hosts=("elsewhere.example",))), ca=vault.authority.cert)
    misnamed = url.replace(str(front.front_of(servers.holder.port)), str(elsewhere.front_of(servers.holder.port)))
    try:
        for other in (strange, silent, misnamed):
            with open_membership(other) as membership:
                assert not membership.connected
        with open_membership(misnamed + "&ssl_check_hostname=false") as membership:
            assert membership.connected
    finally:
        elsewhere.close()


def test_secured_store_is_judged_by_the_given_authorities_alone(
    servers: SingleServer, vault: Vault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An authority that the system trusts is none where the URL names another; without one in the URL it is the system's that count."""
    monkeypatch.setenv("SSL_CERT_FILE", str(vault.authority.cert))
    url = servers.url(servers.new_name(), 1000)
    ours = f"&ssl_ca_certs={vault.authority.cert}"
    with open_membership(url.replace(ours, "")) as membership:
        assert membership.connected
    with open_membership(url.replace(ours, f"&ssl_ca_certs={Authority(tmp_path, 'stranger').cert}")) as membership:
        assert not membership.connected


def test_secured_url_with_files_that_are_no_good_is_a_config_error(servers: SingleServer, vault: Vault, tmp_path: Path) -> None:
    """A path that is wrong will never be right: better to say so than to try for ever."""
    url = servers.url(servers.new_name(), 1000)
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    for good, bad in ((vault.authority.cert, "/nowhere/ca.pem"), (vault.authority.cert, nonsense), (vault.client.key, nonsense)):
        with pytest.raises(ConfigError, match="can't use the certificates"):
            open_membership(url.replace(str(good), str(bad)))


@pytest.mark.parametrize("kind", ["sentinel", "cluster"])
def test_secured_sentinels_and_nodes_are_asked_over_tls_too(kind: str, vault: Vault, front: TlsFront, tmp_path: Path) -> None:
    """Those who only say where the records are get the same care as the server that holds them."""
    make = SentinelServers if kind == "sentinel" else RedisClusterServers
    with make(tmp_path, front_of=front.front_of) as servers:
        url = servers.url(servers.new_name(), 1000).replace("redis+", "rediss+") + vault.options()
        plain = {server.port: front.plain[server.port] for server in servers.servers}
        with open_membership(url) as here, open_membership(url) as there:
            registration = here.join(role="node", address=ADDRESS)
            assert until(there, lambda view: len(view) == 1) == (registration.member,)
        asked = servers.sentinels[0] if isinstance(servers, SentinelServers) else servers.servers[0]
        assert front.secure[asked.port] >= 3
        assert front.secure[servers.holder.port] >= 3
        if kind == "cluster":  # a sentinel itself speaks to the master without TLS
            assert {server.port: front.plain[server.port] for server in servers.servers} == plain


def _files(pair: Pair) -> tuple[Path, Path]:
    return pair.cert, pair.key
