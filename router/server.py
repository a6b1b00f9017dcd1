"""uvicorn, run by us: on our socket and loop, with our signals."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette

from kvpool.errors import ConfigError
from kvpool.security.watched import Watched
from kvpool.wire.credentials import Security, check_pair

BACKLOG = 1024
_LOOK_TICKS = 10
IDLE_S = 75
"""An idle connection lives longer than gateways keep theirs (60 s): who closes first must not be the one that is about to be asked."""


class Server(uvicorn.Server):
    """Serves `app` until `should_exit` is set. Signals are the caller's: uvicorn would send itself each one again at the end."""

    def __init__(self, app: Starlette, drain_timeout_s: int, tls: "ServerTls | None" = None) -> None:
        """Requests in flight get `drain_timeout_s` to finish at the end. With `tls` it speaks HTTPS only."""
        self._tls = tls
        self._app = app
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http="httptools",
                ws="none",
                log_config=None,
                access_log=False,
                backlog=BACKLOG,
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=drain_timeout_s,
                **({} if tls is None else tls.options()),
            )
        )
        self.serving = asyncio.Event()
        """Set once requests are accepted."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets)
        self.serving.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop; what would go on for ever (recordings) ends now, and does not use up the time of those in flight."""
        self._app.state.drain()
        await super().shutdown(sockets)

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; new certificates are for those who connect from now on."""
        if self._tls is not None and counter % _LOOK_TICKS == 0:
            self._tls.follow(self.config.ssl)
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield


class ServerTls:
    """The certificate that a router shows, read again when its files change, and whom it wants one of. Raises `ConfigError`."""

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._watched = Watched(self._parse, cert, key)
        self._shown = self._watched.value()

    @classmethod
    def of(cls, security: Security, client_ca: Path | None = None) -> Self | None:
        """With the certificate of `security`; None when it has none. `client_ca`: only clients with a certificate by it are served."""
        if security.tls_cert is None or security.tls_key is None:
            if client_ca is not None:
                raise ConfigError("--https-client-ca asks clients for a certificate: give --tls-cert and --tls-key too")
            return None
        return cls(security.tls_cert, security.tls_key, client_ca)

    def options(self) -> dict[str, Any]:
        """For uvicorn."""
        files = {"ssl_certfile": str(self._cert), "ssl_keyfile": str(self._key)}
        if self._client_ca is None:
            return files
        return {**files, "ssl_ca_certs": str(self._client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}

    def follow(self, context: ssl.SSLContext | None) -> None:
        """Put what the files hold now into `context`, if it is something new."""
        now = self._watched.value()
        if context is not None and now != self._shown:
            context.load_cert_chain(self._cert, self._key)
            self._shown = now

    def _parse(self, cert: bytes, key: bytes) -> tuple[bytes, bytes]:
        check_pair(self._cert, self._key)
        return cert, key
