"""A cluster changed by hand."""

import uuid
from collections.abc import Callable
from typing import Any

from kvpool.cluster import Member
from kvpool.cluster.config import ClusterConfig
from kvpool.cluster.member import Identity


class ScriptedCluster:
    """A `ClusterView` and `PoolView` changed by hand, and the connections to what is in it."""

    def __init__(self, model: str, block_tokens: int = 4, max_tokens: int = 4096) -> None:
        self._info = {"model": model, "namespace": "ab" * 32, "block_tokens": str(block_tokens), "max_tokens": str(max_tokens)}
        self._members: tuple[Member, ...] = ()
        self._ports: dict[str, Any] = {}
        self._callbacks: list[Callable[[tuple[Member, ...]], None]] = []
        self.config = ClusterConfig()
        self.ill: set[Identity] = set()

    def add(self, role: str, port: Any, *, id: str | None = None, incarnation: int = 1, info: dict[str, str] | None = None) -> Member:
        """A process joins; `connect` gives `port` for its address."""
        address = f"worker:{len(self._ports) + 1}"
        self._ports[address] = port
        known = {**self._info, **(info or {})}
        member = Member(role=role, id=id or uuid.uuid4().hex, incarnation=incarnation, address=address, info=known)
        self._show((*(m for m in self._members if (m.role, m.id) != (member.role, member.id)), member))
        return member

    def remove(self, member: Member) -> None:
        """It leaves."""
        self._show(tuple(m for m in self._members if m != member))

    def connect(self, address: str) -> Any:
        """The port at `address`."""
        return self._ports[address]

    def members(self, role: str | None = None) -> tuple[Member, ...]:
        """See `ClusterView`."""
        return tuple(m for m in self._members if role is None or m.role == role)

    def quarantined(self) -> frozenset[Identity]:
        """See `PoolView`."""
        return frozenset(self.ill)

    def subscribe(self, callback: Callable[[tuple[Member, ...]], None]) -> Callable[[], None]:
        """See `ClusterView`."""
        self._callbacks.append(callback)
        callback(self._members)
        return lambda: self._callbacks.remove(callback)

    def _show(self, members: tuple[Member, ...]) -> None:
        self._members = members
        for callback in self._callbacks:
            callback(members)
