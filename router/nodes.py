"""Connections to pool nodes: one per life of a node, closed once it has left the view and nobody is using it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

from kvpool.cluster import Member


class Closing(Protocol):
    """What can be closed."""

    async def close(self) -> None:
        """Disconnect."""
        ...


P = TypeVar("P", bound=Closing)


class _Link(Generic[P]):
    """A connection and how many calls are using it."""

    def __init__(self, port: P) -> None:
        self.port = port
        self.users = 0


class NodeLinks(Generic[P]):
    """The connections, made when they are needed by `connect`. Lives on one event loop."""

    def __init__(self, connect: Callable[[Member], P]) -> None:
        self._connect = connect
        self._links: dict[tuple[str, int], _Link[P]] = {}

    @asynccontextmanager
    async def use(self, node: Member) -> AsyncIterator[P]:
        """The connection to this life of `node`, which stays open for the length of the block."""
        key = node.id, node.incarnation
        if key not in self._links:
            self._links[key] = _Link(self._connect(node))
        link = self._links[key]
        link.users += 1
        try:
            yield link.port
        finally:
            link.users -= 1

    async def keep(self, alive: set[tuple[str, int]]) -> None:
        """Disconnect from all but those (id, incarnation), unless a call is still waiting for one."""
        gone = [key for key, link in self._links.items() if key not in alive and link.users == 0]
        await asyncio.gather(*(link.port.close() for link in [self._links.pop(key) for key in gone]))

    async def close(self) -> None:
        """Disconnect from all."""
        links, self._links = list(self._links.values()), {}
        await asyncio.gather(*(link.port.close() for link in links))
