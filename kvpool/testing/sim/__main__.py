"""`python -m kvpool.testing.sim`: run seeds, or tell one seed's story.

--seed S --trace            a transcript of one seed, and its verdict
--seeds 500 --events 2000   many seeds; with --json one JSON object in the last line
--nodes 5                   a cluster of so many nodes instead of one node
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from kvpool.testing.sim.cluster import CLUSTER_MARKS, run_cluster
from kvpool.testing.sim.marks import DISK_MARKS, MARKS, Coverage
from kvpool.testing.sim.run import Verdict, run_seed

Run = Callable[..., Verdict]
"""Runs one seed: (seed, events, write_line)."""


def main() -> int:
    """Exit code 1 when a promise was broken."""
    parser = argparse.ArgumentParser(
        prog="python -m kvpool.testing.sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--nodes", type=int, default=1, help="how many nodes")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, counting up")
    parser.add_argument("--events", type=int, default=2000, help="events with faults per seed; the proof of liveness comes on top")
    parser.add_argument("--trace", action="store_true", help="print a transcript of --seed")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--jobs", type=int, default=1, help="processes; the result doesn't depend on it")
    options = parser.parse_args()
    logging.disable()  # a tier's complaints about faults that are made on purpose are no news
    run: Run = run_seed if options.nodes == 1 else partial(run_cluster, nodes=options.nodes)
    coverage = Coverage((*MARKS, *DISK_MARKS) if options.nodes == 1 else CLUSTER_MARKS)
    started_s = time.perf_counter()
    if options.trace:
        return _report([run(options.seed, options.events, write_line=print)], started_s, coverage, as_json=options.json)
    seeds = range(options.seed, options.seed + options.seeds)
    return _report(_verdicts(run, seeds, options.events, options.jobs), started_s, coverage, as_json=options.json)


def _verdicts(run: Run, seeds: range, events: int, jobs: int) -> Iterator[Verdict]:
    one = partial(run, events=events)
    if jobs == 1:
        yield from map(one, seeds)
        return
    with ProcessPoolExecutor(jobs) as processes:
        yield from processes.map(one, seeds, chunksize=8)


def _report(verdicts: Iterable[Verdict], started_s: float, coverage: Coverage, *, as_json: bool) -> int:
    """Print violations as they come and the sums at the end."""
    digest, events, delivered, count, violations = 0, 0, 0, 0, list[str]()
    for verdict in verdicts:
        count += 1
        coverage.add(verdict.coverage)
        digest = (digest * 1_000_003 + verdict.digest) & 0xFFFF_FFFF_FFFF_FFFF
        events += verdict.events
        delivered += verdict.delivered
        if verdict.violation:
            violations.append(f"seed {verdict.seed} at {verdict.time_ns} ns: {verdict.violation}")
            print(violations[-1], file=sys.stderr)
    seconds = time.perf_counter() - started_s
    sums = {
        "violations": len(violations),
        "seconds": round(seconds, 3),
        "events_per_s": round(events / seconds),
        "seeds": count,
        "events": events,
        "blocks_read": delivered,
        "digest": f"{digest:016x}",
        "coverage": coverage.counts,
        "failures": violations[:20],
    }
    if as_json:
        print(json.dumps(sums))
    else:
        rate = f"{events} events in {seconds:.1f} s, {events / seconds:.0f}/s"
        print(f"{count} seeds, {rate}; {delivered} blocks read; digest {sums['digest']}")
        print(
            f"{len(violations)} violations"
            + (f"; not reached: {', '.join(coverage.missing())}" if coverage.missing() and count > 1 else "")
        )
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
