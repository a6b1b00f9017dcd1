"""One connection to the server that holds a cluster's records, found and made anew whenever it breaks.

All keys of a cluster lie in one hash slot, so at any time one server holds them all, whatever the deployment; what differs
is how to find it. A single server is where the URL says. With Sentinel, a sentinel says who the master is. In a Redis
Cluster any node, asked for a key, either has it or says who does (MOVED). The client on top is the same plain one, with the
same login and TLS for each.

Every call has a timeout, that of a heartbeat is shorter than a lease. A call that fails drops the connection; when it had
worked before, the call is tried once more at once on a new one, so a server that was restarted or moved between two calls
costs nothing. A call that timed out isn't tried again: who is silent now is silent a moment later.

The client library would quietly connect again to where it was, perhaps to a master that has become a replica. So a client here
connects once in its life.
"""

import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.exceptions import MovedError
from redis.retry import Retry

from kvpool.cluster.redis_keys import Keys
from kvpool.cluster.url import ClusterUrl
from kvpool.errors import ConfigError

STORE_ERRORS = (redis.RedisError, OSError)
"""What a call may raise."""

T = TypeVar("T")
Host = tuple[str, int]


class Link:
    """Any thread may call, one call runs at a time."""

    def __init__(self, url: ClusterUrl, *, timeout_s: float | None = None) -> None:
        """Connects with the first call. `timeout_s`: of one call, by default that of a heartbeat.

        Raises `ConfigError` when the certificates or the password file of the URL are no good.
        """
        self._url = url
        self._timeout_s = timeout_s or url.timeout_s
        self._tls = _tls_context(url)
        try:
            self._login()
        except OSError as error:
            raise ConfigError(f"can't read password_file of the cluster URL: {error}") from error
        self._hosts = list(url.hosts)
        self._one_call = threading.Lock()
        self._client: redis.Redis | None = None
        self._proven = False
        self.generation = 0
        """Grows with every connection made: a change between two calls means that another server may have answered."""

    def call(self, ask: Callable[[redis.Redis], T]) -> T:
        """What `ask` returns. Raises one of `STORE_ERRORS`."""
        with self._one_call:
            was_proven = self._proven
            try:
                return self._try(ask)
            except redis.TimeoutError:
                raise
            except STORE_ERRORS:
                if not was_proven:
                    raise
            return self._try(ask)

    def close(self) -> None:
        """Disconnect; a later call connects again."""
        client, self._client, self._proven = self._client, None, False
        if client is not None:
            client.close()

    def _try(self, ask: Callable[[redis.Redis], T]) -> T:
        try:
            if self._client is None:
                self._client = self._connect()
                self.generation += 1
            answer = ask(self._client)
        except STORE_ERRORS as error:
            self.close()
            if isinstance(error, MovedError) and self._url.kind in ("single", "unix"):
                raise redis.ResponseError("it is one node of a Redis Cluster and not the right one; use redis+cluster://") from error
            raise
        self._proven = True
        return answer

    def _connect(self) -> redis.Redis:
        url = self._url
        if url.kind == "unix":
            return redis.Redis(unix_socket_path=url.path, **_options(self._timeout_s), **self._login())
        return self._client_of(url.hosts[0] if url.kind == "single" else self._find(), self._timeout_s, self._login())

    def _login(self) -> dict[str, Any]:
        """Who we are, with the password as the file has it now: it may be replaced while we run."""
        if not self._url.password_file:
            return self._url.login
        return self._url.login | {"password": Path(self._url.password_file).read_text(errors="replace").strip()}

    def _client_of(self, host: Host, timeout_s: float, login: dict[str, Any]) -> redis.Redis:
        options = {"host": host[0], "port": host[1], **_options(timeout_s), **login}
        if self._tls is None:
            return redis.Redis(**options)
        return redis.Redis.from_pool(redis.ConnectionPool(connection_class=_TlsConnection, context=self._tls, **options))

    def _find(self) -> Host:
        """Ask the sentinels or nodes, the last helpful one first, until one knows; within one timeout for them all."""
        answers: list[str] = []
        for host in self._hosts:
            login = self._url.sentinel_login if self._url.kind == "sentinel" else self._login()
            client = self._client_of(host, self._timeout_s / len(self._hosts), login)
            try:
                found = self._ask_sentinel(client) if self._url.kind == "sentinel" else self._ask_node(client, host)
            except STORE_ERRORS as error:
                answers.append(f"{host[0]}:{host[1]}: {error}")
            else:
                self._hosts.remove(host)
                self._hosts.insert(0, host)
                return found
            finally:
                client.close()
        raise redis.ConnectionError("; ".join(answers))

    def _ask_sentinel(self, client: redis.Redis) -> Host:
        address: Any = client.sentinel_get_master_addr_by_name(self._url.service)
        if address is None:
            raise redis.ConnectionError(f"this sentinel knows no master {self._url.service!r}")
        return address[0] if isinstance(address[0], str) else address[0].decode(), int(address[1])

    def _ask_node(self, client: redis.Redis, host: Host) -> Host:
        try:
            client.get(Keys(self._url.name).birth)
        except MovedError as moved:
            return moved.host or host[0], moved.port
        return host


def _options(timeout_s: float) -> dict[str, Any]:
    """RESP 2, which every server speaks, one connection made once, and no retries but ours."""
    limits = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, "max_connections": 1}
    return {"protocol": 2, "retry": Retry(NoBackoff(), 0), "redis_connect_func": _Once(), **limits}


class _Once:
    """Greets the server when a client connects, and refuses to when it does so again."""

    def __init__(self) -> None:
        self._done = False

    def __call__(self, connection: Any) -> None:
        if self._done:
            raise redis.ConnectionError("the connection was lost")
        self._done = True
        connection.on_connect()


class _TlsConnection(redis.SSLConnection):
    """TLS as `context` says. The client library's own makes a context per connection, 20 ms, that always trusts the system too."""

    def __init__(self, *, context: ssl.SSLContext, **options: Any) -> None:
        super().__init__(**options)
        self._context = context

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> ssl.SSLSocket:
        return self._context.wrap_socket(sock, server_hostname=self.host)


def _tls_context(url: ClusterUrl) -> ssl.SSLContext | None:
    """None without TLS."""
    if not url.tls:
        return None
    try:
        context = ssl.create_default_context(cafile=url.tls.get("ssl_ca_certs"))
        context.check_hostname = url.tls["ssl_check_hostname"]
        if "ssl_certfile" in url.tls:
            context.load_cert_chain(url.tls["ssl_certfile"], url.tls["ssl_keyfile"])
    except OSError as error:
        files = ", ".join(str(url.tls[name]) for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile") if name in url.tls)
        raise ConfigError(f"can't use the certificates in the cluster URL ({files}): {error}") from error
    return context
