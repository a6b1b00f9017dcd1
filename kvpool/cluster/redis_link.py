"""One connection to a membership server, made anew when it breaks.

Every call has a timeout shorter than a lease. A call that fails drops the connection; when it had worked before, the call is
tried once more at once on a new one, so a server that was restarted between two calls costs nothing. A call that timed out
isn't tried again: who is silent now is silent a moment later.
"""

from collections.abc import Callable
from typing import TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvpool.cluster.membership import ClusterUrl
from kvpool.errors import ConfigError

STORE_ERRORS = (redis.RedisError, OSError)
"""What a call may raise."""

T = TypeVar("T")


def connect(url: ClusterUrl) -> redis.Redis:
    """A client with one connection, timeouts below the lease, and no retries. Raises `ConfigError` for a bad URL."""
    timeout_s = min(1.0, url.lease_ms / 1000 / 3)
    try:
        return redis.Redis.from_url(
            url.server, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0), max_connections=2
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"bad cluster URL {url.server!r}: {error}") from error


class Link:
    """For one thread at a time."""

    def __init__(self, url: ClusterUrl) -> None:
        """Connects with the first call. Raises `ConfigError` for a bad URL."""
        self._url = url
        self._client: redis.Redis | None = connect(url)
        self._proven = False
        self.generation = 0
        """Grows with every connection made: a change between two calls means that another server may have answered."""

    def call(self, ask: Callable[[redis.Redis], T]) -> T:
        """What `ask` returns. Raises one of `STORE_ERRORS`."""
        try:
            return self._try(ask)
        except redis.TimeoutError:
            raise
        except STORE_ERRORS:
            if not self._proven:
                raise
        self._proven = False
        return self._try(ask)

    def close(self) -> None:
        """Disconnect; a later call connects again."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _try(self, ask: Callable[[redis.Redis], T]) -> T:
        if self._client is None:
            self._client = connect(self._url)
        if not self._proven:
            self.generation += 1
        try:
            answer = ask(self._client)
        except STORE_ERRORS:
            self.close()
            raise
        self._proven = True
        return answer
