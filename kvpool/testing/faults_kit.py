"""What a membership store may do to its cluster, as tests: subclass `FaultsKit` and provide a fixture `world`.

Lost, hung, restarted empty, emptied: each time nobody is dropped, nothing is forgotten, no caller waits, and two leases after the
store serves again it holds everything again. That last bound is the only time that a test here insists on.
"""

import threading
import time
from collections.abc import Callable

from kvpool.cluster import ClusterConfig, Identity, Member, Membership
from kvpool.testing.membership_kit import DEADLINE_S, MembershipWorld, Reporters, eventually, until
from kvpool.units import SECOND

SETTLE_LEASES = 2
_ROUNDS = 200


class Scene:
    """Four nodes, one of them in quarantine, a config that was changed, and somebody who watches and remembers."""

    def __init__(self, world: MembershipWorld) -> None:
        self.world = world
        self.nodes = Reporters(world, 4)
        self.watcher = world.open()
        self.members = {registration.member for registration in self.nodes.registrations}
        self.config = self.nodes.memberships[0].configure(lambda config: config.with_setting("copies", "2"))
        self.quarantined = frozenset({self.nodes.subject.identity})
        threading.Thread(target=self._stand_by_it, daemon=True).start()
        self.everybody = (self.watcher, *self.nodes.memberships)
        eventually(lambda: all(self._knows_all(each) for each in self.everybody), "everybody knows all")
        self.views: list[tuple[set[Member], ClusterConfig, frozenset[Identity]]] = []
        self.watcher.subscribe(self._remember)

    def lost(self) -> bool:
        """True when everybody has noticed that the store doesn't answer."""
        return not any(each.connected for each in self.everybody)

    def found(self) -> bool:
        """True when everybody is in touch with the store."""
        return all(each.connected for each in self.everybody)

    def check_nothing_dropped(self) -> None:
        """At no time did the watcher see less than everything."""
        assert self._knows_all(self.watcher)
        assert all(self.members <= members and (config, out) == (self.config, self.quarantined) for members, config, out in self.views)

    def check_settles(self, back_s: float) -> None:
        """A newcomer, who knows only what the store says, sees everything within two leases of the store's return at `back_s`."""
        deadline_ns = int((back_s + SETTLE_LEASES * self.world.lease_s) * SECOND)
        newcomer = self.world.open()
        newcomer.wait(
            lambda view: (set(view), newcomer.config, newcomer.quarantined()) == (self.members, self.config, self.quarantined), deadline_ns
        )
        self.check_nothing_dropped()

    def configs(self) -> set[ClusterConfig]:
        """What the nodes believe."""
        return {each.config for each in self.nodes.memberships}

    def _knows_all(self, membership: Membership) -> bool:
        seen = set(membership.members()), membership.config, membership.quarantined()
        return seen == (self.members, self.config, self.quarantined)

    def _stand_by_it(self) -> None:
        """Two of the three others say that the first can't be reached, again and again until they leave."""
        while all(self.nodes.report(reporter, healthy=False) for reporter in (1, 2)):
            time.sleep(self.world.lease_s / 4)

    def _remember(self, view: tuple[Member, ...]) -> None:
        self.views.append((set(view), self.watcher.config, self.watcher.quarantined()))


class FaultsKit:
    """Tests every store must pass."""

    def test_fault_lost_for_longer_than_a_lease_drops_nobody(self, world: MembershipWorld) -> None:
        """The last view serves for as long as the store is away; what the members said meanwhile is heard when it is back."""
        scene = Scene(world)
        world.kill_store()
        eventually(scene.lost, "everybody notices")
        time.sleep(world.lease_s)  # so that all leases have run out
        scene.check_nothing_dropped()
        world.restart_store()
        scene.check_settles(time.monotonic())

    def test_fault_hung_keeps_the_view_and_makes_nobody_wait(self, world: MembershipWorld) -> None:
        """A store that takes questions and answers none is noticed by its silence; whoever looks, or has something to say, goes on."""
        scene = Scene(world)
        changing = scene.nodes.registrations[3]
        world.pause_store()
        try:
            eventually(scene.lost, "the silence is noticed")
            _goes_on(scene.nodes.memberships[3], lambda turn: changing.update({"turn": str(turn)}))
            scene.check_nothing_dropped()
            time.sleep(0.7 * world.lease_s)  # with the silence that it took to notice, all leases have run out
        finally:
            world.resume_store()
        back_s = time.monotonic()
        scene.members = {registration.member for registration in scene.nodes.registrations}
        newcomer = world.open()
        newcomer.wait(lambda view: set(view) == scene.members, int((back_s + SETTLE_LEASES * world.lease_s) * SECOND))
        eventually(lambda: scene.found() and set(scene.watcher.members()) == scene.members, "everybody is in touch again")
        assert changing.member.info == {"turn": str(_ROUNDS - 1)}
        assert newcomer.quarantined() == scene.watcher.quarantined() == scene.quarantined
        assert {len(members) for members, _, _ in scene.views} == {4}
        assert {(config, out) for _, config, out in scene.views} == {(scene.config, scene.quarantined)}

    def test_fault_restarted_empty_is_filled_again(self, world: MembershipWorld) -> None:
        """A store that forgot everything is told again by the heartbeats, the config too."""
        scene = Scene(world)
        world.kill_store()
        world.restart_store()
        scene.check_settles(time.monotonic())

    def test_fault_emptied_while_it_runs_is_filled_again(self, world: MembershipWorld) -> None:
        """No connection broke and no call failed, and still nobody believes that nobody is here."""
        scene = Scene(world)
        world.empty_store()
        scene.check_settles(time.monotonic())

    def test_fault_member_that_died_meanwhile_is_gone_within_two_leases(self, world: MembershipWorld) -> None:
        """Doubt ends: who doesn't come back after the store did is given up, and nobody else is."""
        scene = Scene(world)
        world.pause_store()
        eventually(scene.lost, "everybody notices")
        scene.nodes.registrations[3].abandon()
        world.resume_store()
        back_s = time.monotonic()
        left = scene.members - {scene.nodes.registrations[3].member}
        scene.watcher.wait(lambda view: set(view) == left, int((back_s + SETTLE_LEASES * world.lease_s) * SECOND))

    def test_fault_older_config_in_the_store_is_put_right(self, world: MembershipWorld) -> None:
        """A store that went back in time, as a replica that was behind, changes nothing; nor does one with nonsense in it."""
        scene = Scene(world)
        for text in (ClusterConfig(version=1, copies=9).encode(), "nonsense"):
            newest = scene.nodes.memberships[1].configure(lambda config: config.with_setting("hot_reads", str(config.hot_reads + 1)))
            eventually(lambda newest=newest: scene.configs() == {newest}, "everybody has the change")  # type: ignore[misc]
            world.write_config(text)
            newcomer = world.open()
            eventually(lambda seen=newcomer, newest=newest: seen.config == newest, "the newest is put back")  # type: ignore[misc]
            assert scene.configs() == {newest}

    def test_fault_config_change_while_the_store_forgets_builds_on_what_is_known(self, world: MembershipWorld) -> None:
        """Whoever changes one setting right after the store was emptied loses no other."""
        scene = Scene(world)
        world.empty_store()
        changed = scene.nodes.memberships[0].configure(lambda config: config.with_setting("hot_reads", "7"))
        assert (changed.version, changed.copies, changed.hot_reads) == (2, 2, 7)
        until(scene.watcher, lambda view: scene.watcher.config == changed)


def _goes_on(membership: Membership, say: Callable[[int], None]) -> None:
    """Look and speak some hundred times. Were one of these calls to wait for the store even once, this would take far too long."""
    (first, *_) = membership.members("node")

    def work() -> None:
        for turn in range(_ROUNDS):
            assert membership.members()
            assert membership.config.version == 1
            assert membership.quarantined()
            assert not membership.connected
            membership.report(*first.identity, healthy=turn % 2 == 0)
            membership.report(*first.identity, healthy=True)
            say(turn)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), "a caller waits for the store"
