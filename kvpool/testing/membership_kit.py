"""The contract of a membership store, as tests: subclass `MembershipKit` and provide a fixture `world`.

The kit talks about behaviour only (what another process sees, before, during and after an outage) and waits with generous
deadlines instead of sleeping, so the same tests hold for the in-memory twin and for a real server.
"""

import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Protocol

import pytest

from kvpool.cluster import ClusterConfig, Member, Membership, Registration
from kvpool.cluster.member import MAX_INFO_BYTES
from kvpool.errors import ClosedError, ConfigError, DeadlineError, UnavailableError
from kvpool.units import SECOND

DEADLINE_S = 30
ADDRESS = "127.0.0.1:7001"


class MembershipWorld(Protocol):
    """A store under test and what may happen to it."""

    def open(self) -> Membership:
        """A membership of its own, as another process would hold. The world closes it at the end."""
        ...

    lease_s: float
    """How long a silent member is believed to live."""

    def kill_store(self) -> None:
        """The store dies as by `kill -9`."""
        ...

    def restart_store(self) -> None:
        """The store is back at the same place and has forgotten everything; it serves when this returns."""
        ...

    def pause_store(self) -> None:
        """The store hangs: it can be asked and doesn't answer."""
        ...

    def resume_store(self) -> None:
        """The store goes on where it was, with what had run out meanwhile gone."""
        ...

    def empty_store(self) -> None:
        """The store forgets everything while it runs."""
        ...

    def write_config(self, text: str) -> None:
        """Somebody else writes `text` where the config stands."""
        ...

    def write_record(self, role: str, id: str, record: str) -> None:
        """Somebody else writes `record` where the member (`role`, `id`) would stand."""
        ...


def until(membership: Membership, predicate: Callable[[tuple[Member, ...]], bool]) -> tuple[Member, ...]:
    """The first view for which `predicate` holds."""
    return membership.wait(predicate, time.monotonic_ns() + DEADLINE_S * SECOND)


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Poll `condition` until it holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.01)


class MembershipKit:
    """Tests every store must pass."""

    def test_join_seen_by_another_process_with_all_fields(self, world: MembershipWorld) -> None:
        """Who joins is found by everyone, with its address and info."""
        here, there = world.open(), world.open()
        registration = here.join(role="prefill", address=ADDRESS, info={"model": "smollm2", "namespace": "ä" * 8})
        (seen,) = until(there, lambda view: len(view) == 1)
        assert seen == registration.member
        assert (seen.role, seen.address, seen.info["namespace"]) == ("prefill", ADDRESS, "ä" * 8)
        assert seen.incarnation >= 1
        assert here.connected
        assert there.connected

    def test_leave_seen_at_once_without_waiting_for_the_lease(self, world: MembershipWorld) -> None:
        """A clean leave takes exactly the member that left."""
        here, there = world.open(), world.open()
        staying = here.join(role="node", address=ADDRESS)
        leaving = here.join(role="node", address="127.0.0.1:7002")
        until(there, lambda view: len(view) == 2)
        leaving.close()
        leaving.close()
        assert until(there, lambda view: len(view) == 1) == (staying.member,)

    def test_crash_without_leave_ends_with_the_lease(self, world: MembershipWorld) -> None:
        """A process that stops renewing is given up by the others, with nobody's help."""
        here, there = world.open(), world.open()
        crashing = here.join(role="node", address=ADDRESS)
        staying = here.join(role="node", address="127.0.0.1:7002")
        until(there, lambda view: len(view) == 2)
        crashing.abandon()
        assert until(there, lambda view: len(view) == 1) == (staying.member,)

    def test_rejoin_under_the_same_id_supersedes_with_a_higher_incarnation(self, world: MembershipWorld) -> None:
        """A restarted process is recognisable as new, and its predecessor's goodbye doesn't take it away."""
        here, there = world.open(), world.open()
        id = uuid.uuid4().hex
        first = here.join(role="node", id=id, address=ADDRESS)
        until(there, lambda view: len(view) == 1)
        second = here.join(role="node", id=id, address="127.0.0.1:7002")
        assert second.member.incarnation > first.member.incarnation
        assert until(there, lambda view: view == (second.member,)) == (second.member,)
        eventually(lambda: first.superseded, "the first registration learns that it was superseded")
        first.close()
        marker = here.join(role="router", address="127.0.0.1:7003")  # a change after the goodbye
        assert until(there, lambda view: marker.member in view) == (second.member, marker.member)
        assert not second.superseded

    def test_two_roles_listed_apart_and_in_order(self, world: MembershipWorld) -> None:
        """A view is filtered by role and always in the same order; one id may serve two roles."""
        here, there = world.open(), world.open()
        id = uuid.uuid4().hex
        node = here.join(role="node", id=id, address=ADDRESS).member
        workers = [here.join(role="decode", address=f"127.0.0.1:{port}").member for port in (7002, 7003)]
        workers.append(here.join(role="decode", id=id, address="127.0.0.1:7004").member)
        until(there, lambda view: len(view) == 4)
        assert there.members("node") == (node,)
        assert there.members("decode") == tuple(sorted(workers, key=lambda member: member.id))
        assert there.members() == (*there.members("decode"), node)
        assert there.members("router") == ()
        with pytest.raises(ConfigError):
            there.members("nodes")

    def test_outage_refuses_newcomers_and_admits_them_afterwards(self, world: MembershipWorld) -> None:
        """Without its store a cluster keeps whom it has; joining is an error that says so, changing the config too."""
        here, there = world.open(), world.open()
        member = here.join(role="node", address=ADDRESS).member
        until(there, lambda view: len(view) == 1)
        world.kill_store()
        eventually(lambda: not there.connected and not here.connected, "the loss is noticed")
        assert there.members() == (member,)
        with pytest.raises(UnavailableError):
            here.join(role="node", address="127.0.0.1:7003")
        with pytest.raises(UnavailableError):
            here.configure(lambda config: replace(config, copies=2))
        assert here.config == ClusterConfig()
        world.restart_store()
        eventually(lambda: there.connected and here.connected, "the store is found again")
        late = here.join(role="router", address="127.0.0.1:7004")
        until(there, lambda view: view == (member, late.member))

    def test_incarnation_grows_even_when_the_store_forgot_it(self, world: MembershipWorld) -> None:
        """Two lives of one id never share an incarnation, or stale hints about the first would be believed of the second."""
        here = world.open()
        first = here.join(role="node", address=ADDRESS)
        first.abandon()
        world.empty_store()
        second = here.join(role="node", id=first.member.id, address=ADDRESS)
        assert second.member.incarnation > first.member.incarnation

    def test_subscriber_gets_the_view_now_and_after_each_change(self, world: MembershipWorld) -> None:
        """Nothing falls between subscribing and the first change, one bad subscriber spoils nothing, and unsubscribing ends it."""
        here, there = world.open(), world.open()
        good: list[tuple[Member, ...]] = []
        ended: list[tuple[Member, ...]] = []

        def bad(view: tuple[Member, ...]) -> None:
            raise RuntimeError("a subscriber's mistake")

        there.subscribe(bad)
        there.subscribe(good.append)
        there.subscribe(ended.append)()
        assert good == [()]
        registration = here.join(role="node", address=ADDRESS)
        eventually(lambda: good[-1] == (registration.member,), "the join is announced")
        registration.close()
        eventually(lambda: good[-1] == (), "the leave is announced")
        assert ended == [()]

    def test_bad_arguments_refused_before_anything_is_stored(self, world: MembershipWorld) -> None:
        """Role, id, address and the size of info are checked where the mistake is made."""
        here, there = world.open(), world.open()
        with pytest.raises(ConfigError):
            here.join(role="king", address=ADDRESS)
        with pytest.raises(ConfigError):
            here.join(role="node", address=ADDRESS, id="node-1")
        for address in ("nowhere", "h:0", "h:99999", ":7000"):
            with pytest.raises(ConfigError):
                here.join(role="node", address=address)
        with pytest.raises(ConfigError, match="info"):
            here.join(role="node", address=ADDRESS, info={"k": "v" * MAX_INFO_BYTES})
        largest = here.join(role="node", address=ADDRESS, info={"k": "\0" * (MAX_INFO_BYTES - 1)})
        assert until(there, lambda view: len(view) > 0) == (largest.member,)

    def test_malformed_records_ignored_and_counted(self, world: MembershipWorld) -> None:
        """What a stranger or an older version wrote never becomes a member and never hides the others."""
        here, there = world.open(), world.open()
        ids = [uuid.uuid4().hex for _ in range(4)]
        for id, record in zip(ids, ("", "{", '{"v":1,"role":"node"}', '{"v":99}'), strict=True):
            world.write_record("node", id, record)
        eventually(lambda: there.malformed_records == 4, "four records are counted, each once")
        registration = here.join(role="node", address=ADDRESS)
        assert until(there, lambda view: len(view) > 0) == (registration.member,)
        assert there.malformed_records == 4

    def test_wait_past_its_deadline_says_who_is_there(self, world: MembershipWorld) -> None:
        """Every wait ends, and its error names the members that were seen."""
        here = world.open()
        registration = here.join(role="node", address=ADDRESS)
        until(here, lambda view: len(view) == 1)
        with pytest.raises(DeadlineError, match=registration.member.id[:8]):
            here.wait(lambda view: len(view) == 2, time.monotonic_ns())

    def test_close_leaves_with_all_registrations(self, world: MembershipWorld) -> None:
        """A process that closes its membership is gone for the others; what it knew stays readable."""
        here, there = world.open(), world.open()
        here.join(role="node", address=ADDRESS)
        here.join(role="decode", address=ADDRESS)
        until(there, lambda view: len(view) == 2)
        here.close()
        here.close()
        until(there, lambda view: len(view) == 0)
        with pytest.raises(ClosedError):
            here.join(role="node", address=ADDRESS)
        with pytest.raises(ClosedError):
            here.wait(lambda view: len(view) == 99, time.monotonic_ns() + SECOND)

    def test_update_seen_by_all_under_the_same_incarnation(self, world: MembershipWorld) -> None:
        """What a member says about itself may change while it lives; subscribers hear of it."""
        here, there = world.open(), world.open()
        registration = here.join(role="node", address=ADDRESS, info={"state": "joining", "zone": "a"})
        first = registration.member
        until(there, lambda view: view == (first,))
        views: list[tuple[Member, ...]] = []
        there.subscribe(views.append)
        registration.update({"state": "active"})
        assert registration.member == replace(first, info={"state": "active"})
        eventually(lambda: views[-1] == (registration.member,), "the change is announced")
        with pytest.raises(ConfigError, match="info"):
            registration.update({"k": "v" * MAX_INFO_BYTES})
        assert registration.member.info == {"state": "active"}

    def test_config_is_the_default_until_somebody_changes_it(self, world: MembershipWorld) -> None:
        """Everybody sees each change, the one who made it at once, and nobody needs to be a member for it."""
        here, there = world.open(), world.open()
        assert here.config == there.config == ClusterConfig()
        seen: list[ClusterConfig] = []
        there.subscribe(lambda view: seen.append(there.config))
        changed = here.configure(lambda config: config.with_setting("copies", "2"))
        assert changed == here.config == ClusterConfig(version=1, copies=2)
        eventually(lambda: seen[-1] == changed, "the change is announced")
        assert there.configure(lambda config: replace(config, near_copies=False)) == replace(changed, version=2, near_copies=False)
        eventually(lambda: here.config.version == 2, "the second change comes back")
        assert world.open().config == there.config

    def test_config_change_without_effect_or_with_an_error_changes_nothing(self, world: MembershipWorld) -> None:
        """A version stands for a change, and a change that fails halfway isn't one."""
        here = world.open()
        first = here.configure(lambda config: replace(config, copies=3))
        assert here.configure(lambda config: replace(config, copies=3)) == first
        with pytest.raises(ConfigError, match="copies"):
            here.configure(lambda config: replace(config, copies=0))
        assert here.config == world.open().config == first

    def test_config_changes_at_the_same_time_all_count(self, world: MembershipWorld) -> None:
        """Compare and set: of many writers none overwrites another."""
        writers = [world.open() for _ in range(4)]

        def write(number: int) -> None:
            for name in (f"namespace_copies.{number:016x}{turn:016x}" for turn in range(3)):
                writers[number].configure(partial(ClusterConfig.with_setting, name=name, text="2"))

        with ThreadPoolExecutor(len(writers)) as pool:
            list(pool.map(write, range(len(writers))))
        config = world.open().config
        assert (config.version, len(config.namespace_copies)) == (12, 12)

    def test_quarantine_takes_more_than_half_and_ends_with_the_reports(self, world: MembershipWorld) -> None:
        """One reporter among three others is a broken reporter; two are a broken member; when one takes it back all is well."""
        cluster, there = Reporters(world, 4), world.open()
        until(there, lambda view: len(view) == 4)
        assert cluster.report(1, healthy=False)
        eventually(lambda: there.connected and not there.quarantined(), "one vote of three counts for nothing")
        marker = cluster.memberships[3].join(role="router", address=ADDRESS)  # a change after the report
        until(there, lambda view: marker.member in view)
        assert there.quarantined() == frozenset()
        heard: list[int] = []
        there.subscribe(lambda view: heard.append(len(there.quarantined())))
        assert cluster.report(2, healthy=False)
        eventually(lambda: there.quarantined() == {cluster.subject.identity}, "two votes of three cut it off")
        eventually(lambda: heard[-1] == 1, "subscribers hear of it")
        assert cluster.subject in there.members()
        assert cluster.report(1, healthy=True)
        eventually(lambda: not there.quarantined(), "it is admitted again")

    def test_quarantine_ends_with_its_reporter(self, world: MembershipWorld) -> None:
        """Nobody stays cut off by a word that nobody stands by."""
        cluster, there = Reporters(world, 2), world.open()
        assert cluster.report(1, healthy=False)
        eventually(lambda: len(there.quarantined()) == 1, "a single reporter decides alone")
        cluster.memberships[1].close()
        eventually(lambda: not there.quarantined(), "it went with its reporter")

    def test_report_needs_a_node_or_worker_and_is_never_of_itself(self, world: MembershipWorld) -> None:
        """Routers and onlookers have no vote, and nobody has one about itself."""
        cluster, onlooker = Reporters(world, 2), world.open()
        assert not onlooker.report(*cluster.subject.identity, healthy=False)
        onlooker.join(role="router", address=ADDRESS)
        assert not onlooker.report(*cluster.subject.identity, healthy=False)
        assert cluster.report(0, healthy=False)
        onlooker.join(role="prefill", address=ADDRESS)
        marker = cluster.memberships[0].join(role="router", address=ADDRESS)
        until(onlooker, lambda view: marker.member in view)
        assert onlooker.quarantined() == frozenset()
        assert onlooker.report(*cluster.subject.identity, healthy=False)
        assert cluster.report(1, healthy=False)
        eventually(lambda: len(onlooker.quarantined()) == 1, "both others report it")

    def test_report_of_a_former_life_says_nothing_about_the_next(self, world: MembershipWorld) -> None:
        """An incarnation is what can't be reached, not an id."""
        cluster, there = Reporters(world, 2), world.open()
        assert cluster.report(1, healthy=False)
        eventually(lambda: len(there.quarantined()) == 1, "the first life is cut off")
        second = cluster.memberships[0].join(role="node", id=cluster.subject.id, address=ADDRESS)
        until(there, lambda view: second.member in view)
        assert there.quarantined() == frozenset()


class Reporters:
    """Some nodes, each with a membership of its own, and the first of them as the one that the others report."""

    def __init__(self, world: MembershipWorld, count: int) -> None:
        self.memberships = [world.open() for _ in range(count)]
        self.registrations: list[Registration] = [each.join(role="node", address=ADDRESS) for each in self.memberships]
        self.subject = self.registrations[0].member

    def report(self, reporter: int, *, healthy: bool) -> bool:
        """What `reporter` says of the first."""
        return self.memberships[reporter].report(*self.subject.identity, healthy=healthy)
