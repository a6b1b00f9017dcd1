"""What a process believes about the cluster: the pure rule that turns readings of a store into a view.

A reading is the set of members whose leases the store holds now. Normally the view is just that. But a store that was
unreachable, or that lost its memory (restarted empty, flushed, failed over to an empty replica), says "nobody" before the
heartbeats have had their turn; believing it would drop the whole cluster for a second. So after a gap the view is *in
doubt*: members it knew and the reading lacks stay until each has had one whole lease of its own to publish itself again.

A gap shows in two ways: the shell reports that a reading failed (`lost`), or the store's birth token, a random value that
the first heartbeat after an emptying writes, differs from the one before. In doubt, an id that appears with a lower
incarnation than the one known is an old process that got in first, and the known one stays.

With the members come two things that everybody must see alike: who is in quarantine, by the votes in the members' own
records, and the cluster's config, of which the highest version ever seen holds.
"""

from collections.abc import Iterable

from kvpool.cluster.config import ClusterConfig
from kvpool.cluster.member import Identity, Leased, Member
from kvpool.cluster.quarantine import vote
from kvpool.units import MS


class View:
    """The members last known. Not thread-safe; `Board` shares it."""

    def __init__(self) -> None:
        self.config = ClusterConfig()
        """The last known."""
        self.quarantined: frozenset[Identity] = frozenset()
        """Members that most others can't reach."""
        self._unannounced = False
        self._known: dict[tuple[str, str], Leased] = {}
        self._birth: str | None = None
        self._lost = False
        self._doubt_since_ns: int | None = None
        self._members: tuple[Member, ...] = ()

    @property
    def members(self) -> tuple[Member, ...]:
        """Ordered by role and id."""
        return self._members

    def lost(self) -> None:
        """A reading failed: keep everything, and doubt the next reading that succeeds."""
        self._lost = True

    def learn(self, config: ClusterConfig) -> None:
        """This process changed the config itself: what the next `observe` is to announce."""
        if config.version > self.config.version:
            self.config, self._unannounced = config, True

    def observe(self, reading: Iterable[Leased], *, birth: str | None, now_ns: int, config: ClusterConfig | None = None) -> bool:
        """Take in one complete reading of the store; True when the members, the quarantine or the config changed."""
        before = self._members, self.quarantined, self.config
        if self._known and (self._lost or birth != self._birth):
            self._doubt_since_ns = now_ns
        self._lost, self._birth = False, birth
        found: dict[tuple[str, str], Leased] = {}
        for leased in reading:
            key = leased.member.role, leased.member.id
            if key not in found or found[key].member.incarnation < leased.member.incarnation:
                found[key] = leased
        for key, leased in self._known.items():
            in_doubt = self._doubt_since_ns is not None and now_ns - self._doubt_since_ns < leased.lease_ms * MS
            if in_doubt and (key not in found or found[key].member.incarnation < leased.member.incarnation):
                found[key] = leased
        self._known = found
        self._members = tuple(found[key].member for key in sorted(found))
        self.quarantined = vote(found.values())
        if config is not None and config.version >= self.config.version:
            self.config = config
        changed = self._unannounced or before != (self._members, self.quarantined, self.config)
        self._unannounced = False
        return changed
