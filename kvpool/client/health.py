"""How well each node answers this client: who rests, who is slow right now, who needs a probe. Pure: time is an argument.

A call that fails lets its node rest for a second, so that a dead node costs one failed call, not one a block. Calls that were under
way at that moment belong to the same failure. The third failure in a row, none more than a minute after the one before, makes
the node *ill*: it rests longer, twice as long with each further failure, and only a probe brings it back: after that it is asked again,
and has to answer a real call before its failures are forgotten. Control calls and data transfers are counted apart, since one
of the two can work without the other.

A call that was given less than a second and didn't make it says little about its node: the node rests, but it is no failure in a row. Or an
impatient caller would make healthy nodes ill.

A call is *overdue* when it takes longer than three times what this node's calls usually take, and 50 ms at least. Nobody is blamed
for that, but whoever has another node to ask doesn't wait longer, and others are asked before a node with an overdue call.
"""

from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from kvpool.units import MS, SECOND

Peer = TypeVar("Peer")
Plane = Literal["control", "data"]

STRIKES = 3
"""Failures in a row that make a node ill."""
REST_NS = SECOND
ILL_REST_NS = 2 * SECOND
LONGEST_REST_NS = 60 * SECOND
WINDOW_NS = 60 * SECOND
"""A failure that comes so long after the last rest is a new story."""
FAIR_NS = SECOND
"""A control call that had so long and wasn't answered has failed."""
PATIENCE_NS = 50 * MS
PATIENCE_FACTOR = 3
_OLD_SHARE = 0.8


@dataclass(slots=True)
class _Record:
    calls: dict[int, int] = field(default_factory=dict)
    """Number of each call under way -> when it began."""
    usual_ns: float = 0.0
    strikes: dict[Plane, int] = field(default_factory=dict)
    rest_until_ns: int = 0
    ill: bool = False


class Health(Generic[Peer]):
    """What one client knows of the nodes it calls. Bounded by `keep_only`."""

    def __init__(self) -> None:
        self._records: dict[Peer, _Record] = {}
        self._calls = 0

    def begin(self, peer: Peer, now_ns: int) -> int:
        """A control call begins; its number."""
        self._calls += 1
        self._records.setdefault(peer, _Record()).calls[self._calls] = now_ns
        return self._calls

    def end(self, peer: Peer, call: int, now_ns: int, *, answered: bool) -> None:
        """A call that `begin` announced has ended; how it failed, if it did, is for `failed` to say."""
        record = self._records.get(peer)
        began_ns = record.calls.pop(call, None) if record is not None else None
        if record is not None and began_ns is not None and answered:
            took_ns = now_ns - began_ns
            record.usual_ns = record.usual_ns * _OLD_SHARE + took_ns * (1 - _OLD_SHARE) if record.usual_ns else took_ns
            self.well(peer, "control")

    def well(self, peer: Peer, plane: Plane) -> None:
        """A call has been answered, or bytes have moved."""
        record = self._records.get(peer)
        if record is not None:
            record.strikes.pop(plane, None)
            if not record.strikes:
                record.ill, record.rest_until_ns = False, 0

    def doubted(self, peer: Peer) -> bool:
        """Whether `well` would change anything. For any thread."""
        record = self._records.get(peer)
        return record is not None and bool(record.strikes or record.rest_until_ns or record.ill)

    def failed(self, peer: Peer, plane: Plane, now_ns: int) -> None:
        """A call has failed, or bytes have not moved."""
        record = self._records.setdefault(peer, _Record())
        if now_ns < record.rest_until_ns:
            return
        if now_ns - record.rest_until_ns > WINDOW_NS:
            record.strikes.clear()
        strikes = record.strikes[plane] = record.strikes.get(plane, 0) + 1
        record.ill = strikes >= STRIKES
        rest_ns = min(ILL_REST_NS << min(strikes - STRIKES, 16), LONGEST_REST_NS) if record.ill else REST_NS
        record.rest_until_ns = now_ns + rest_ns

    def late(self, peer: Peer, now_ns: int) -> None:
        """A call, or bytes, had too little time."""
        record = self._records.setdefault(peer, _Record())
        record.rest_until_ns = max(record.rest_until_ns, now_ns + REST_NS)

    def probed(self, peer: Peer) -> None:
        """A probe has been answered: the node may be asked again, on probation."""
        record = self._records.get(peer)
        if record is not None:
            record.ill = False

    def resting(self, peer: Peer, now_ns: int) -> bool:
        """True while `peer` is not to be asked. For any thread."""
        record = self._records.get(peer)
        return record is not None and (record.ill or now_ns < record.rest_until_ns)

    def overdue(self, peer: Peer, now_ns: int) -> bool:
        """True while a call to `peer` takes longer than it should. For any thread."""
        record = self._records.get(peer)
        return record is not None and bool(record.calls) and now_ns - min(record.calls.values(), default=now_ns) > self.patience_ns(peer)

    def patience_ns(self, peer: Peer) -> int:
        """How long to wait for `peer` before somebody else is asked too."""
        record = self._records.get(peer)
        return max(PATIENCE_NS, int(PATIENCE_FACTOR * record.usual_ns)) if record is not None else PATIENCE_NS

    def ill(self) -> list[Peer]:
        """Those that only a probe brings back."""
        return [peer for peer, record in self._records.items() if record.ill]

    def to_probe(self, now_ns: int) -> list[Peer]:
        """Those of them that have rested."""
        return [peer for peer in self.ill() if self._records[peer].rest_until_ns <= now_ns]

    def keep_only(self, peers: set[Peer]) -> None:
        """Forget all others that have no call under way."""
        self._records = {peer: record for peer, record in self._records.items() if peer in peers or record.calls}
