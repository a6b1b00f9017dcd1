"""uvicorn, run by us: on our socket and loop, with our signals."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

BACKLOG = 1024


class Server(uvicorn.Server):
    """Serves `app` until `should_exit` is set. Signals are the caller's: uvicorn would send itself each one again at the end."""

    def __init__(self, app: Starlette, drain_timeout_s: int) -> None:
        """Requests in flight get `drain_timeout_s` to finish at the end."""
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http="httptools",
                ws="none",
                log_config=None,
                access_log=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=drain_timeout_s,
            )
        )
        self.serving = asyncio.Event()
        """Set once requests are accepted."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets)
        self.serving.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield
