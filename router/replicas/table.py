"""What the other routers keep workers busy with, added up. Pure; time is an argument.

Theory. Each router knows exactly what it has sent itself, and of the others what they said last. A report counts until it is `MAX_AGE_NS`
old: an older one says nothing about now, and to think a worker less busy than it is for a moment is better than to shun it for ever. A
report replaces the one before as a whole, so nothing adds up wrongly whatever was lost. Routers can't agree in less time than a report
takes, so two may choose the same idle worker; each sees the other's request after `REPORT_S`.
"""

from collections.abc import Mapping

from kvpool.policy.routing import WorkerRef
from kvpool.request.load import LoadReport
from kvpool.units import SECOND
from router.worker import Elsewhere

MAX_AGE_NS = SECOND


class LoadTable:
    """The last report of each other router, by its identity."""

    def __init__(self) -> None:
        self._reports: dict[tuple[str, int], tuple[int, LoadReport]] = {}

    def heard(self, router: tuple[str, int], report: LoadReport, now_ns: int) -> None:
        """`router` (id, incarnation) keeps workers busy with this, and nothing else."""
        self._reports[router] = now_ns, report

    def lost(self, router: tuple[str, int]) -> None:
        """`router` can't be heard any more: what it said is not known to be so."""
        self._reports.pop(router, None)

    def ages(self, now_ns: int) -> Mapping[tuple[str, int], int]:
        """How old each router's report is, in nanoseconds."""
        return {router: now_ns - at_ns for router, (at_ns, _) in self._reports.items()}

    def total(self, now_ns: int) -> dict[WorkerRef, Elsewhere]:
        """What all of them together keep workers busy with, by reports that aren't too old."""
        found: dict[WorkerRef, Elsewhere] = {}
        for at_ns, report in self._reports.values():
            if now_ns - at_ns > MAX_AGE_NS:
                continue
            for load in report:
                ref = WorkerRef(load.role, load.id, load.incarnation)
                before = found.get(ref, Elsewhere())
                found[ref] = Elsewhere(
                    before.active + load.active,
                    before.queued + load.queued,
                    before.backlog_tokens + load.backlog_tokens,
                    before.decode_tokens + load.decode_tokens,
                )
        return found
