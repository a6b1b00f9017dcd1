"""The in-memory twin keeps the membership contract."""

import uuid
from collections.abc import Iterator

import pytest

from kvpool.cluster import Membership, open_membership
from kvpool.cluster.memory import MemoryStore
from kvpool.testing.faults_kit import FaultsKit
from kvpool.testing.membership_kit import MembershipKit, Reporters, eventually


class MemoryWorld:
    def __init__(self) -> None:
        self._name = f"test-{uuid.uuid4().hex[:8]}"
        self.lease_s = 0.2
        self._open: list[Membership] = []

    def open(self) -> Membership:
        membership = open_membership(f"memory://{self._name}?lease_ms=200")
        self._open.append(membership)
        return membership

    def kill_store(self) -> None:
        MemoryStore.named(self._name).go_down()

    def restart_store(self) -> None:
        MemoryStore.named(self._name).come_back(emptied=True)

    def pause_store(self) -> None:
        MemoryStore.named(self._name).go_down()

    def resume_store(self) -> None:
        MemoryStore.named(self._name).come_back(emptied=False)

    def empty_store(self) -> None:
        MemoryStore.named(self._name).come_back(emptied=True)

    def write_config(self, text: str) -> None:
        MemoryStore.named(self._name).write_config(text)

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


class TestMemoryFaults(FaultsKit):
    pass


def test_memory_store_of_the_same_name_starts_anew_once_all_left(world: MemoryWorld) -> None:
    """Tests that reuse a name don't inherit each other's members."""
    first = world.open()
    first.join(role="node", address="127.0.0.1:1").abandon()
    first.close()
    assert world.open().members() == ()


def test_memory_report_that_is_not_repeated_ends(world: MemoryWorld) -> None:
    """A reporter that lives on and has nothing more to say of it doesn't stand by its word either."""
    cluster, there = Reporters(world, 2), world.open()
    assert cluster.report(1, healthy=False)
    eventually(lambda: len(there.quarantined()) == 1, "it is cut off")
    eventually(lambda: not there.quarantined(), "the report has run out")
