"""API keys: who may ask, how often, and whose KV it is; over HTTPS when there is a certificate."""

import contextlib
import logging
import shutil
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvpool.errors import ConfigError
from kvpool.request import Scope
from kvpool.security.salt import Salts, narrowed, tenant_salt
from kvpool.security.tenants import TenantBook
from kvpool.security.tokens import TokenTable, new_token, revoke
from kvpool.testing.certificates import Authority
from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.guard import Guard
from router.server import ServerTls
from router.settings import Limits
from router.testing.cluster import ScriptedCluster
from router.testing.model import NAME, tiny_model
from router.testing.server import serving
from router.testing.workers import ScriptedWorker
from router.text.model import TextModel

SECRET = b"s" * 40
BODY = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """One tiny model for all tests here."""
    return tiny_model(tmp_path_factory.mktemp("model"))


@dataclass
class Stage:
    """A router that asks for keys, over one worker."""

    http: httpx.AsyncClient
    worker: ScriptedWorker
    directory: Path

    def key(self, *rights: str, tenant: str | None = None, name: str = "alice") -> dict[str, str]:
        """Headers with a fresh key."""
        _, token = new_token(self.directory / "tokens", name=name, tenant=tenant, rights=rights or ("read", "write"), now_s=0)
        return {"authorization": f"Bearer {token}"}

    async def chat(self, headers: dict[str, str], **fields: Any) -> httpx.Response:
        """One chat request."""
        return await self.http.post("/v1/chat/completions", json={**BODY, **fields}, headers=headers)

    @property
    def scope(self) -> Scope:
        """Of the last request that reached the worker."""
        return self.worker.calls[-1].scope


@contextlib.asynccontextmanager
async def stage(
    model: TextModel, directory: Path, security: Security = PLAIN, *, limits: Limits | None = None, **http: Any
) -> AsyncIterator[Stage]:
    """The table, the limits and the secret are files in `directory`."""
    new_token(directory / "tokens", name="first", tenant=None, rights=["read"], now_s=0)
    (directory / "secret").write_bytes(SECRET)
    guard = Guard(
        security=security,
        tokens=TokenTable(directory / "tokens"),
        book=TenantBook(directory / "tenants.json"),
        salts=Salts(directory / "secret"),
    )
    cluster, worker = ScriptedCluster(model.name), ScriptedWorker(lambda prompt, position: 70)
    cluster.add("decode", worker)
    async with (
        serving(model, cluster, guard=guard, limits=limits) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30, **http) as client,
    ):
        yield Stage(client, worker, directory)


def error_of(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The error of a response, its shape checked."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == code
    return error


async def test_request_without_a_known_key_is_refused_as_openai_does(model: TextModel, tmp_path: Path) -> None:
    """401, before the body is looked at, and the key is not quoted."""
    async with stage(model, tmp_path) as on:
        error_of(await on.chat({}), 401, "missing_api_key")
        error_of(await on.chat({"authorization": "Basic x"}), 401, "missing_api_key")
        refused = await on.chat({"authorization": "Bearer kvp_wrongwrong"})
        assert "wrongwrong" not in error_of(refused, 401, "invalid_api_key")["message"]
        assert refused.headers["www-authenticate"] == "Bearer"
        headers = on.key()
        assert (await on.chat(headers)).status_code == 200
        revoke(on.directory / "tokens", "alice")
        error_of(await on.chat(headers), 401, "invalid_api_key")
        assert len(on.worker.calls) == 1


async def test_key_without_the_right_is_refused(model: TextModel, tmp_path: Path) -> None:
    """403: generating reads and writes KV; metrics tell of everybody."""
    async with stage(model, tmp_path) as on:
        reader, user, admin = on.key("read"), on.key(name="user"), on.key("admin", name="admin")
        assert "'write'" in error_of(await on.chat(reader), 403, "insufficient_permissions")["message"]
        assert (await on.http.get("/v1/models", headers=reader)).status_code == 200
        assert (await on.http.post("/tokenize", json={"text": "a"}, headers=reader)).status_code == 200
        error_of(await on.http.get("/metrics", headers=user), 403, "insufficient_permissions")
        assert (await on.http.get("/metrics", headers=admin)).status_code == 200
        error_of(await on.http.get("/v1/models"), 401, "missing_api_key")
        error_of(await on.http.post("/tokenize", json={"text": "a"}), 401, "missing_api_key")
        assert (await on.http.get("/health")).status_code == 200


async def test_tenant_of_the_key_decides_the_salt(model: TextModel, tmp_path: Path) -> None:
    """Whatever the body says: a wish is mixed in and never replaces it."""
    async with stage(model, tmp_path) as on:
        acme, other = on.key(tenant="acme"), on.key(tenant="other", name="bob")
        nobody = on.key(name="nobody")
        salt = tenant_salt(SECRET, "acme")
        await on.chat(acme)
        assert on.scope == Scope(salt=salt, tenant="acme")
        await on.chat(acme, cache_salt="mine")
        assert on.scope == Scope(salt=narrowed(salt, b"mine"), tenant="acme")
        await on.chat(other, cache_salt="mine")
        assert on.scope.salt == narrowed(tenant_salt(SECRET, "other"), b"mine")
        await on.chat(other, cache_salt=salt.hex())
        assert on.scope.salt not in (salt, narrowed(salt, b"mine"))
        await on.chat(nobody)
        assert on.scope == Scope()
        assert (await on.chat(acme, cache_salt="")).status_code == 400
        assert (await on.chat(acme, cache_salt="x" * 257)).status_code == 400


async def test_tenant_above_its_rate_gets_429_with_a_time(model: TextModel, tmp_path: Path) -> None:
    """Others go on; a lifted limit counts at once."""
    async with stage(model, tmp_path) as on:
        acme, other = on.key(tenant="acme"), on.key(tenant="other", name="bob")
        book = TenantBook(tmp_path / "tenants.json")
        book.change("acme", requests_per_s=0.01)
        assert (await on.chat(acme)).status_code == 200
        refused = await on.chat(acme)
        assert error_of(refused, 429, "rate_limit_exceeded")["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 100
        assert (await on.chat(other)).status_code == 200
        book.change("acme", requests_per_s=0.0)
        assert (await on.chat(acme)).status_code == 200


async def test_router_without_a_secret_refuses_tenants(model: TextModel, tmp_path: Path) -> None:
    """Rather than serve them from one namespace."""
    _, token = new_token(tmp_path / "tokens", name="a", tenant="acme", rights=["read", "write"], now_s=0)
    cluster, worker = ScriptedCluster(model.name), ScriptedWorker(lambda prompt, position: 70)
    cluster.add("decode", worker)
    guard = Guard(tokens=TokenTable(tmp_path / "tokens"))
    async with serving(model, cluster, guard=guard) as running, httpx.AsyncClient(base_url=running.url, timeout=30) as http:
        answer = await http.post("/v1/chat/completions", json=BODY, headers={"authorization": f"Bearer {token}"})
    assert answer.status_code == 400
    assert "--cluster-secret" in answer.text
    assert worker.calls == []


async def test_https_serves_and_plain_http_gets_nothing(model: TextModel, tmp_path: Path) -> None:
    """A certificate means HTTPS only."""
    authority = Authority(tmp_path)
    context = ssl.create_default_context(cafile=authority.cert)
    async with stage(model, tmp_path, authority.server(), verify=context) as on:
        assert (await on.chat(on.key())).status_code == 200
        async with httpx.AsyncClient(timeout=10) as plain:
            with pytest.raises(httpx.HTTPError):
                await plain.get(str(on.http.base_url).replace("https", "http") + "/health")


def test_new_certificate_is_shown_without_a_restart(tmp_path: Path) -> None:
    """The context that listens gets it; half a pair does not count."""
    authority = Authority(tmp_path)
    old, new = authority.sign("old"), authority.sign("new")
    cert, key = tmp_path / "c.pem", tmp_path / "k.pem"
    shutil.copy(old.cert, cert)
    shutil.copy(old.key, key)
    tls = ServerTls(cert, key)
    loaded: list[bytes] = []

    class Context(ssl.SSLContext):
        def load_cert_chain(self, certfile: Any, keyfile: Any = None, password: Any = None) -> None:
            loaded.append(Path(certfile).read_bytes())
            super().load_cert_chain(certfile, keyfile, password)

    context = Context(ssl.PROTOCOL_TLS_SERVER)
    tls.follow(context)
    assert loaded == []
    shutil.copy(new.cert, cert)
    tls.follow(context)
    assert loaded == []
    shutil.copy(new.key, key)
    tls.follow(context)
    assert loaded == [new.cert.read_bytes()]


def test_client_certificates_need_a_server_certificate(tmp_path: Path) -> None:
    """And are then required."""
    authority = Authority(tmp_path)
    with pytest.raises(ConfigError, match="--tls-cert"):
        ServerTls.of(PLAIN, authority.cert)
    tls = ServerTls.of(authority.server(), authority.cert)
    assert tls is not None
    assert tls.options()["ssl_cert_reqs"] == ssl.CERT_REQUIRED


async def test_no_key_and_no_salt_in_the_log(model: TextModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At debug level, whatever becomes of the request."""
    with caplog.at_level(logging.DEBUG):
        async with stage(model, tmp_path) as on:
            good, poor = on.key(tenant="acme"), on.key("read", name="reader")
            assert (await on.chat(good, cache_salt="my-own-wish")).status_code == 200
            assert (await on.chat(poor)).status_code == 403
            assert (await on.chat({"authorization": "Bearer kvp_" + "x" * 43})).status_code == 401
    keys = [headers["authorization"].removeprefix("Bearer ") for headers in (good, poor)]
    salts = [tenant_salt(SECRET, "acme").hex(), on.scope.salt.hex(), repr(on.scope.salt)]
    assert "chatcmpl-" in caplog.text
    assert [secret for secret in (*keys, *salts, "x" * 43, "my-own-wish", SECRET.decode()) if secret in caplog.text] == []


async def test_key_above_its_rate_is_told_when_to_come_back_and_others_are_not(model: TextModel, tmp_path: Path) -> None:
    """One key that floods is held back by itself, tenant or not."""
    async with stage(model, tmp_path, limits=Limits(key_requests_per_s=2)) as s:
        flood, calm = s.key(name="flood"), s.key(name="calm", tenant="t")
        statuses = [(await s.chat(flood)).status_code for _ in range(6)]
        assert statuses[:2] == [200, 200]
        assert 429 in statuses
        assert (await s.chat(calm)).status_code == 200
        while (refused := await s.chat(flood)).status_code == 200:
            pass
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert "key flood" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
