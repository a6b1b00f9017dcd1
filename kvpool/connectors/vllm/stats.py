"""What is counted, by both sides of the connector; sums only, so that any two can be added: of ranks, of steps, of minutes."""

from collections.abc import Mapping
from typing import NamedTuple


class Count(NamedTuple):
    """One number: what it counts, and whether it is one now (a gauge) instead of so many in all."""

    text: str
    gauge: bool = False


COUNTS: dict[str, Count] = {
    "lookups": Count("Requests whose prefix was looked up in the pool"),
    "lookup_seconds": Count("Seconds spent in lookups, by the scheduler"),
    "lookup_blocks": Count("Blocks looked up"),
    "found_blocks": Count("Leading blocks found"),
    "loads": Count("Loads, one for each request and rank"),
    "loads_within_step": Count("Loads that a step waited for"),
    "load_seconds": Count("Seconds from the start of a load to its end"),
    "load_blocks": Count("Blocks loaded"),
    "load_bytes": Count("Bytes loaded"),
    "load_failed_blocks": Count("Blocks that were found and couldn't be loaded: computed instead"),
    "saves": Count("Saves, one for each request, step and rank"),
    "save_seconds": Count("Seconds from the start of a save to its end"),
    "save_blocks": Count("Blocks that the pool holds after a save"),
    "save_bytes": Count("Bytes copied into the pool"),
    "save_failed_blocks": Count("Blocks that the pool didn't take"),
    "dropped_blocks": Count("Blocks not saved because too many were waiting for it, or a load had failed"),
    "unnamed_requests": Count("Requests that can't be cached: media or embeddings without shared block hashes, or an unreadable adapter"),
    "held_blocks": Count("The engine's blocks that saves hold", gauge=True),
}


class Tally:
    """Counts since they were last taken."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}

    def add(self, name: str, count: float = 1) -> None:
        """Count some more of what `COUNTS` knows."""
        if COUNTS[name].gauge:
            self._counts[name] = count
        else:
            self._counts[name] = self._counts.get(name, 0) + count

    def take(self) -> dict[str, float]:
        """The counts, which begin anew."""
        counts, self._counts = self._counts, {}
        return counts


def added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """Both together; of what is a gauge the later, `other`."""
    total = dict(one)
    for name, count in other.items():
        gauge = name in COUNTS and COUNTS[name].gauge
        total[name] = count if gauge else total.get(name, 0) + count
    return total


def summary(counts: Mapping[str, float]) -> dict[str, float]:
    """What one line of vLLM's log says of an interval."""
    line: dict[str, float] = {}
    for kind, done in (("load", "loaded"), ("save", "saved")):
        if blocks := counts.get(f"{kind}_blocks"):
            seconds = counts.get(f"{kind}_seconds", 0.0)
            line[f"{done} blocks"] = int(blocks)
            line[f"{kind} MB/s"] = round(counts.get(f"{kind}_bytes", 0) / 1e6 / seconds, 1) if seconds else 0.0
    line["failed blocks"] = int(counts.get("load_failed_blocks", 0) + counts.get("save_failed_blocks", 0))
    if lookups := counts.get("lookups"):
        line["lookup ms"] = round(1e3 * counts.get("lookup_seconds", 0) / lookups, 3)
        line["found of looked up"] = round(counts.get("found_blocks", 0) / max(counts.get("lookup_blocks", 0), 1), 3)
    return line
