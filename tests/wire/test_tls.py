"""TLS and mTLS on gRPC: what is let in, what is not and why, and new certificates without a restart."""

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from kvpool.errors import ConfigError, UnavailableError
from kvpool.testing.certificates import Authority
from kvpool.wire.access_client import AccessRpc
from kvpool.wire.access_server import add_access
from kvpool.wire.channel import bind, make_server
from kvpool.wire.credentials import PLAIN, Security, is_loopback
from kvpool.wire.guard import Guard

Serve = Callable[[Security], Awaitable[str]]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Who signs."""
    return Authority(tmp_path)


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start a server; its address."""
    servers = []

    async def start(security: Security) -> str:
        server = make_server()
        add_access(server, Guard())
        address = bind(server, "127.0.0.1:0", security)
        await server.start()
        servers.append(server)
        return address

    yield start
    for server in servers:
        await server.stop(0)


async def ask(address: str, security: Security) -> str:
    client = AccessRpc(address, security=security)
    try:
        return (await client.who_am_i(5)).name
    finally:
        await client.close()


async def test_client_that_trusts_the_authority_is_served(serve: Serve, authority: Authority) -> None:
    """Over TLS, by address and by name."""
    address = await serve(authority.server())
    assert await ask(address, authority.client()) == "anybody"
    assert await ask(address.replace("127.0.0.1", "localhost"), authority.client()) == "anybody"


async def test_mutual_tls_takes_only_clients_that_the_authority_signed(serve: Serve, authority: Authority, tmp_path: Path) -> None:
    """No certificate, a self-made one and one that has ended are refused; a good one is served."""
    address = await serve(authority.server(mutual=True))
    assert await ask(address, authority.client(shows=authority.sign("worker"))) == "anybody"
    (tmp_path / "other").mkdir()
    stranger = Authority(tmp_path / "other")
    for shown in (None, stranger.sign("worker"), authority.sign("late", days=-1)):
        with pytest.raises(UnavailableError, match="--tls-cert"):
            await ask(address, authority.client(shows=shown))


async def test_plain_client_of_a_tls_server_is_told(serve: Serve, authority: Authority) -> None:
    """Not just 'unavailable'."""
    with pytest.raises(UnavailableError, match="does the server speak TLS"):
        await ask(await serve(authority.server()), PLAIN)


async def test_tls_client_of_a_plain_server_is_told(serve: Serve, authority: Authority) -> None:
    """It must not fall back to plain text."""
    with pytest.raises(UnavailableError, match="the server does not speak TLS"):
        await ask(await serve(PLAIN), authority.client())


async def test_server_that_another_authority_signed_is_refused(serve: Serve, authority: Authority, tmp_path: Path) -> None:
    """Somebody in the middle."""
    (tmp_path / "other").mkdir()
    address = await serve(Authority(tmp_path / "other").server())
    with pytest.raises(UnavailableError, match="not trusted"):
        await ask(address, authority.client())


async def test_server_certificate_for_another_host_is_refused_unless_named(serve: Serve, authority: Authority) -> None:
    """A stolen certificate of another machine."""
    pair = authority.sign("node", hosts=("node-1.pool",))
    address = await serve(Security(tls_cert=pair.cert, tls_key=pair.key))
    with pytest.raises(UnavailableError, match="--tls-name"):
        await ask(address, authority.client())
    assert await ask(address, Security(tls_ca=authority.cert, tls_name="node-1.pool")) == "anybody"


async def test_new_certificate_is_shown_without_a_restart(serve: Serve, authority: Authority, tmp_path: Path) -> None:
    """Rotation: the files are looked at when somebody connects; a broken pair leaves the last one in force."""
    old, new = authority.sign("old", days=-1), authority.sign("new")
    cert, key = tmp_path / "served.crt", tmp_path / "served.key"
    shutil.copy(old.cert, cert)
    shutil.copy(old.key, key)
    address = await serve(Security(tls_cert=cert, tls_key=key))
    with pytest.raises(UnavailableError, match="not trusted"):
        await ask(address, authority.client())
    shutil.copy(new.key, key)
    with pytest.raises(UnavailableError, match="not trusted"):
        await ask(address, authority.client())  # a key without its certificate
    shutil.copy(new.cert, cert)
    assert await ask(address, authority.client()) == "anybody"


def test_half_given_credentials_are_refused(authority: Authority, tmp_path: Path) -> None:
    """Before anything listens."""
    pair, other = authority.sign("a"), authority.sign("b")
    with pytest.raises(ConfigError, match="belong together"):
        Security(tls_cert=pair.cert)
    with pytest.raises(ConfigError, match="--mtls"):
        Security(tls_cert=pair.cert, tls_key=pair.key, mutual=True)
    with pytest.raises(ConfigError, match="can't be used"):
        Security(tls_cert=pair.cert, tls_key=other.key)
    with pytest.raises(ConfigError, match="can't be used"):
        Security(tls_cert=tmp_path / "none", tls_key=pair.key)


def test_token_is_not_sent_or_taken_in_the_clear(tmp_path: Path, authority: Authority) -> None:
    """But on loopback, where nobody listens in."""
    path = tmp_path / "token"
    path.write_text("k" * 40)
    security = Security(token_file=path)
    assert security.metadata("127.0.0.1:1") == (("authorization", "Bearer " + "k" * 40),)
    with pytest.raises(ConfigError, match="in the clear"):
        security.metadata("10.0.0.1:1")
    assert Security(token_file=path, tls_ca=authority.cert).metadata("10.0.0.1:1")
    assert "kkkk" not in repr(security)


@pytest.mark.parametrize(
    ("address", "local"),
    [("127.0.0.1:1", True), ("[::1]:1", True), ("localhost:1", True), ("0.0.0.0:1", False), ("[::]:1", False), ("db:1", False)],
)
def test_loopback_is_told_from_the_network(address: str, local: bool) -> None:
    """A wildcard is the network."""
    assert is_loopback(address) is local


def test_credentials_come_from_a_file_or_the_environment(tmp_path: Path, authority: Authority) -> None:
    """The same object whichever way."""
    pair = authority.sign("a")
    (tmp_path / "security.json").write_text(f'{{"tls_cert": "{pair.cert.name}", "tls_key": "{pair.key.name}", "tls_name": "x"}}')
    expected = Security(tls_cert=pair.cert, tls_key=pair.key, tls_name="x")
    assert Security.load(tmp_path / "security.json") == expected
    environment = {"KVPOOL_TLS_CERT": str(pair.cert), "KVPOOL_TLS_KEY": str(pair.key), "KVPOOL_TLS_NAME": "x", "OTHER": "y"}
    assert Security.from_environment(environment) == expected
    assert Security.from_environment({}) == PLAIN
    (tmp_path / "bad.json").write_text('{"token": "secret"}')
    with pytest.raises(ConfigError, match="only"):
        Security.load(tmp_path / "bad.json")
