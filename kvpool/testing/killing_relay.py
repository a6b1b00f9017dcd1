"""A TCP relay that ends its server once so many bytes have come back from it: a node that dies amid a load, at the same byte every time."""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Self

from kvpool.transport.tcp.stream import shut


class KillingRelay:
    """Passes connections on to host:port `target`; `arm` says after how many more bytes `kill` is called. A context manager."""

    def __init__(self, target: str, kill: Callable[[], None]) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._kill = kill
        self._left: int | None = None
        self._lock = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.killed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, nbytes: int) -> None:
        """Kill when so many bytes more have come from the server."""
        with self._lock:
            self._left = nbytes

    def close(self) -> None:
        """Take no more connections."""
        shut(self._server)  # wakes `accept`, which a close alone leaves waiting, and the port open
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                try:
                    server = socket.create_connection(self._target, timeout=5)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if counted and self._spent(len(data)):
                    self._kill()
                    self.killed.set()
                    break
                sink.sendall(data)
        for end in (source, sink):
            shut(end)
            end.close()

    def _spent(self, nbytes: int) -> bool:
        with self._lock:
            if self._left is None:
                return False
            self._left -= nbytes
            if self._left >= 0:
                return False
            self._left = None
            return True
