"""The in-memory twin keeps the membership contract."""

import uuid
from collections.abc import Iterator

import pytest

from kvpool.cluster import Membership, open_membership
from kvpool.cluster.memory import MemoryStore
from kvpool.testing.membership_kit import MembershipKit


class MemoryWorld:
    def __init__(self) -> None:
        self._name = f"test-{uuid.uuid4().hex[:8]}"
        self._open: list[Membership] = []

    def open(self) -> Membership:
        membership = open_membership(f"memory://{self._name}?lease_ms=200")
        self._open.append(membership)
        return membership

    def kill_store(self) -> None:
        MemoryStore.named(self._name).go_down()

    def restart_store(self) -> None:
        MemoryStore.named(self._name).come_back(emptied=True)

    def write_record(self, role: str, id: str, record: str) -> None:
        store = MemoryStore.named(self._name)
        with store.changed:
            store.raw[f"{role}:{id}"] = record
            store.touch()

    def close(self) -> None:
        for membership in self._open:
            membership.close()


@pytest.fixture
def world() -> Iterator[MemoryWorld]:
    world = MemoryWorld()
    yield world
    world.close()


class TestMemoryMembership(MembershipKit):
    pass


def test_memory_store_of_the_same_name_starts_anew_once_all_left(world: MemoryWorld) -> None:
    """Tests that reuse a name don't inherit each other's members."""
    first = world.open()
    first.join(role="node", address="127.0.0.1:1").abandon()
    first.close()
    assert world.open().members() == ()
