"""The client of the pool, as soon as there is a pool: a server that starts before it, or while it is away, finds nothing meanwhile."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvpool.client.values import ValueClient
from kvpool.connectors.lmcache.settings import Settings
from kvpool.errors import ClosedError, RemoteError

log = logging.getLogger(__name__)
_AGAIN_S = 5.0
"""Between two attempts to connect."""


class Connection:
    """`client()` from any thread; `close` it in the end. Raises `ConfigError` at once for settings that make no sense."""

    def __init__(self, settings: Settings, scope: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._scope = list(scope)
        self._clock = clock
        self._lock = threading.Lock()
        self._client: ValueClient | None = None
        self._closed = False
        self._next = 0.0
        self.client()

    def client(self) -> ValueClient | None:
        """The client; None while nobody answers who could say whose values these are (`kvpool.connect`). Raises `ClosedError`."""
        with self._lock:
            if self._closed:
                raise ClosedError("this connection was closed")
            if self._client is None and self._clock() >= self._next:
                try:
                    self._client = self._connect()
                except RemoteError as error:
                    log.warning("LMCache finds nothing in the pool %s until it answers: %s", self._settings.pool, error)
                    self._next = self._clock() + _AGAIN_S
            return self._client

    def close(self) -> None:
        """Disconnect."""
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connect(self) -> ValueClient:
        settings = self._settings
        return ValueClient(settings.pool, scope=self._scope, transport=settings.transport, timeout_s=settings.timeout_s, threads=1)
