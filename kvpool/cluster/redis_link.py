"""One connection to the server that holds a cluster's records, found and made anew whenever it breaks.

All keys of a cluster lie in one hash slot, so at any time one server holds them all, whatever the deployment; what differs
is how to find it. A single server is where the URL says. With Sentinel, a sentinel says who the master is. In a Redis
Cluster any node, asked for a key, either has it or says who does (MOVED). The client on top is the same plain one, with the
same login and TLS for each.

Every call has a timeout shorter than a lease. A call that fails drops the connection; when it had worked before, the call is
tried once more at once on a new one, so a server that was restarted or moved between two calls costs nothing. A call that
timed out isn't tried again: who is silent now is silent a moment later.
"""

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
    """For one thread at a time."""

    def __init__(self, url: ClusterUrl) -> None:
        """Connects with the first call. Raises `ConfigError` when a file of the URL isn't there."""
        for option in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
            if option in url.tls and not Path(url.tls[option]).is_file():
                raise ConfigError(f"{option} in the cluster URL: there is no file {url.tls[option]}")
        self._url = url
        self._hosts = list(url.hosts)
        self._client: redis.Redis | None = None
        self._proven = False
        self.generation = 0
        """Grows with every connection made: a change between two calls means that another server may have answered."""

    def call(self, ask: Callable[[redis.Redis], T]) -> T:
        """What `ask` returns. Raises one of `STORE_ERRORS`."""
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
            return _client(url.timeout_s, url.login, unix_socket_path=url.path)
        host, port = url.hosts[0] if url.kind == "single" else self._find()
        return _client(url.timeout_s, url.login | url.tls, host=host, port=port)

    def _find(self) -> Host:
        """Ask the sentinels or nodes, the last helpful one first, until one knows; within one timeout for them all."""
        answers: list[str] = []
        for host in self._hosts:
            login = self._url.sentinel_login if self._url.kind == "sentinel" else self._url.login
            client = _client(self._url.timeout_s / len(self._hosts), login | self._url.tls, host=host[0], port=host[1])
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


def _client(timeout_s: float, options: dict[str, Any], **place: Any) -> redis.Redis:
    """A client that connects when it is used, with RESP 2, which every server speaks, and no retries of its own."""
    return redis.Redis(
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        max_connections=2,
        protocol=2,
        **options,
        **place,
    )
