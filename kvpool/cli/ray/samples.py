"""What scaling looks at, read from the cluster: how busy each worker says it is, and the routers' time to first token."""

import asyncio
import time
from collections.abc import Callable, Mapping

from kvpool.cli.http import get_text
from kvpool.cli.ray.scaling import Sample
from kvpool.cli.snapshot import Snapshot, take_snapshot
from kvpool.cluster import Member
from kvpool.errors import KvpoolError

ASK_TIMEOUT_S = 1.5
_TTFT = "kvpool_router_time_to_first_token_seconds"

Totals = Mapping[str, tuple[float, float]]
"""By router: seconds to the first token of all requests so far, and how many requests those were."""


class Sampler:
    """Looks at the members again and again; remembers the routers' totals to tell what is new."""

    def __init__(self, get: Callable[[str], str] | None = None) -> None:
        """`get` fetches the text at a URL."""
        self._get = get or (lambda url: get_text(url, timeout_s=ASK_TIMEOUT_S))
        self._totals: Totals = {}

    def sample(self, members: tuple[Member, ...], roles: tuple[str, ...]) -> dict[str, Sample]:
        """One sample for each of `roles`. Blocks up to `ASK_TIMEOUT_S` for the workers and as long for each router."""
        workers = tuple(member for member in members if member.role in roles)
        snapshot = asyncio.run(take_snapshot(workers, ASK_TIMEOUT_S))
        totals = self._read_totals(members)
        ttft_s = mean_since(self._totals, totals)
        self._totals = totals
        at_s = time.monotonic()
        return {role: group_sample(snapshot, role, at_s=at_s, ttft_s=ttft_s) for role in roles}

    def _read_totals(self, members: tuple[Member, ...]) -> Totals:
        totals = {}
        for member in members:
            if member.role == "router" and "url" in member.info:
                try:
                    totals[f"{member.id}/{member.incarnation}"] = ttft_totals(self._get(f"{member.info['url']}/metrics"))
                except KvpoolError:
                    continue  # a router that does not answer has nothing to say about this interval
        return totals


def group_sample(snapshot: Snapshot, role: str, *, at_s: float, ttft_s: float | None) -> Sample:
    """The sample of one role. Workers that did not answer are not counted."""
    statuses = [report.status for report in snapshot.workers if report.member.role == role and report.status is not None]
    requests = sum(status.active_requests + status.queued_requests for status in statuses)
    return Sample(at_s=at_s, workers=len(statuses), requests=requests, ttft_s=ttft_s)


def ttft_totals(metrics: str) -> tuple[float, float]:
    """(seconds, requests) of the time to first token in a router's text exposition; zeros where it has none yet."""
    found = {"_sum": 0.0, "_count": 0.0}
    for line in metrics.splitlines():
        name, _, value = line.partition(" ")
        if name.removeprefix(_TTFT) in found and name.startswith(_TTFT):
            found[name.removeprefix(_TTFT)] = float(value)
    return found["_sum"], found["_count"]


def mean_since(before: Totals, now: Totals) -> float | None:
    """Mean seconds to the first token of the requests counted in `now` but not in `before`; None when there are none.

    A router that is new in `now` has nothing before: its first look only sets the mark.
    """
    known = [router for router in now if router in before]
    seconds = sum(now[router][0] - before[router][0] for router in known)
    count = sum(now[router][1] - before[router][1] for router in known)
    return seconds / count if count > 0 else None
