"""Defects of the SSD log on purpose: promises about what is on the disk, each broken by one mutant."""

from collections.abc import Callable, Sequence
from typing import Any

from kvpool.testing.sim.mutant import Mutant, Patch
from kvpool.tier.ssd import append, recover, scan, tier
from kvpool.tier.ssd.append import Appender
from kvpool.tier.ssd.disk import Disk
from kvpool.tier.ssd.format import encode_group
from kvpool.tier.ssd.health import Health
from kvpool.tier.ssd.index import Held, LogIndex, Segment
from kvpool.tier.ssd.reader import Fetched
from kvpool.tier.ssd.tier import SsdTier


class _Careless:
    """A disk whose sync is another one's business."""

    def __init__(self, disk: Disk, sync: Callable[[Disk, str], int]) -> None:
        self._disk = disk
        self._sync = sync

    def sync(self, name: str) -> int:
        """What the mutant makes of it."""
        return self._sync(self._disk, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)


def _with_sync(owner: Any, sync: Callable[[Disk, str], int]) -> Sequence[Patch]:
    start = owner.__init__

    def begin(self: Any, disk: Disk, *arguments: Any, **options: Any) -> None:
        start(self, _Careless(disk, sync), *arguments, **options)

    return [(owner, "__init__", begin)]


def _found_before_sync() -> Sequence[Patch]:
    return _with_sync(Appender, lambda disk, name: 0)


def _failed_sync_ignored() -> Sequence[Patch]:
    def hopeful(disk: Disk, name: str) -> int:
        disk.sync(name)
        return 0

    return _with_sync(Appender, hopeful)


def _torn_adopted() -> Sequence[Patch]:
    return [(recover._Replay, "_wrong", lambda self, slot, group: [False] * len(group.records))]


def _checksum_ignored() -> Sequence[Patch]:
    is_right = SsdTier._is_right

    def trusting(self: SsdTier, held: Held, got: Fetched) -> bool | None:
        return is_right(self, held, got) is not None

    return [(SsdTier, "_is_right", trusting)]


def _tombstones_ignored() -> Sequence[Patch]:
    segment = recover._Replay.segment

    def blind(self: recover._Replay, found: scan.Scan, *, check: bool) -> None:
        groups = tuple(group._replace(tombstones=()) for group in found.groups)
        segment(self, found._replace(groups=groups), check=check)

    return [(recover._Replay, "segment", blind)]


def _tombstones_not_written() -> Sequence[Patch]:
    return [(append, "encode_group", lambda group: encode_group(group._replace(tombstones=())))]


def _life_again() -> Sequence[Patch]:
    start = SsdTier.__init__

    def begin(self: SsdTier, disk: Disk, **options: Any) -> None:
        start(self, disk, **options)
        self.incarnation = options["incarnation"]

    return [(SsdTier, "__init__", begin)]


def _tail_only() -> Sequence[Patch]:
    find = scan.scan_segment

    def short(disk: Disk, slot: int, segment_bytes: int) -> scan.Scan | int | None:
        found = find(disk, slot, segment_bytes)
        return found._replace(groups=found.groups[-8:]) if isinstance(found, scan.Scan) else found

    return [(recover, "scan_segment", short)]


def _room_reused() -> Sequence[Patch]:
    empty = LogIndex.empty

    def forgetful(self: LogIndex, segment: Segment, timeout: float) -> int | None:
        held = [held for held, _ in self.live(segment)]
        count = empty(self, segment, timeout)
        for one in held:
            self.add_segment(segment)
            self._add(one)
        return count

    return [(LogIndex, "empty", forgetful)]


def _never_well_again() -> Sequence[Patch]:
    return [(Health, "wrote", lambda self: None)]


def _expired_served() -> Sequence[Patch]:
    return [(tier, "is_expired", lambda expires_ms, now_ms: False)]


DISK_MUTANTS: tuple[Mutant, ...] = (
    Mutant(name="found before sync", what="a record is acknowledged before its sync", seeds=40, patches=_found_before_sync),
    Mutant(
        name="failed sync ignored", what="a sync that failed counts as one", seeds=800, patches=_failed_sync_ignored, needs="sync error"
    ),
    Mutant(name="torn adopted", what="recovery adopts a torn record", seeds=800, patches=_torn_adopted, needs="die inside"),
    Mutant(
        name="checksum ignored", what="a record is served whatever its checksum", seeds=400, patches=_checksum_ignored, needs="bit flip"
    ),
    Mutant(name="tombstones ignored", what="recovery doesn't look at tombstones", seeds=40, patches=_tombstones_ignored),
    Mutant(name="tombstones not written", what="a removal is remembered in memory only", seeds=40, patches=_tombstones_not_written),
    Mutant(name="life again", what="the incarnation follows the wall clock only", seeds=40, patches=_life_again),
    Mutant(name="tail only", what="recovery reads the last groups of a segment only", seeds=40, patches=_tail_only),
    Mutant(name="room reused", what="records of a reclaimed segment stay listed", seeds=40, patches=_room_reused),
    Mutant(name="never well again", what="a disk that has come back is not used", seeds=40, patches=_never_well_again),
    Mutant(name="expired served", what="a record is served after its time", seeds=200, patches=_expired_served),
)
