"""Routing policies on request traces in the simulated cluster (kvpool/replay/sim, docs/routing.md).

`python -m bench.routing --trace PATH [--trace PATH2 ...] [--policy all] [--rates 1,2,4] [--requests N] [--prefill 8] [--decode 8]
[--admission 14,2] [--json]`. PATH: a file that `kvpool replay` reads, such as Mooncake's `conversation_trace.jsonl` and
`synthetic_trace.jsonl`. The world and its constants stand in `kvpool/replay/sim/world.py`; `systems.py` beside it says what comes with
each policy.

A session is what shares its second block, where the trace names none. `bound` is no policy: every prompt alone on a node, with everything
that was ever asked for before in its memory, so nobody who prefills a prompt on one node can have a lower mean.

JSON: trace name → `x1`, `x2`... → policy → figures, besides `bound_ttft_mean_s`, `published_order`, `best_other` and `ours_over_best_ttft`;
`pooled_over_node_hit` (ours over least loaded, whose nodes have their own caches, at the first rate). `ours_over_best_ttft` → rate: over
the mean of all traces' means. `admission` (first trace, last rate, so many prefill and decode nodes): figures of none, early, predicted.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from bench.report import print_json, print_table
from kvpool.errors import ConfigError
from kvpool.policy.admission.early import EarlyRejection, Rejection
from kvpool.policy.routing import OURS, POLICIES, make_policy
from kvpool.replay.sim import Cluster, Outcome, SimRequest, System, World, make_system, outcome
from kvpool.replay.simulate import sim_requests, world_of
from kvpool.replay.traces import Trace, read_trace

SEED = 1
PUBLISHED = ("random", "least_loaded", "aibrix", "mooncake")
"""FAST'25, figure 5, the slowest first: random, load balance, local cache aware, global cache aware."""


def run(world: World, system: System, requests: Sequence[SimRequest], admission: EarlyRejection | None = None) -> Outcome:
    """One system, one trace; the books are checked."""
    cluster = Cluster(world, system, admission)
    return outcome(world, cluster, cluster.run(requests))


def requests_of(trace: Trace, rate: float, count: int | None) -> list[SimRequest]:
    """The first `count` requests, `rate` times as fast, with sessions."""
    sessions = [request.session or str(request.blocks[:2][-1:]) for request in trace.requests]
    requests = sim_requests(trace, rate)[:count]
    return [request._replace(session=session) for request, session in zip(requests, sessions, strict=False)]


def bound(world: World, requests: Sequence[SimRequest]) -> float:
    """Mean seconds to prefill what no earlier request had, alone."""
    seen: set[bytes] = set()
    seconds = []
    for request in requests:
        known = next((at for at, key in enumerate(request.keys) if key not in seen), len(request.keys))
        context = min(known * world.block_tokens, request.prompt_tokens - 1)
        seconds.append(world.prefill_s(request.prompt_tokens - context, context))
        seen.update(request.keys)
    return fmean(seconds)


def compare(world: World, trace: Trace, policies: Sequence[str], rates: Sequence[float], count: int | None) -> dict[str, object]:
    """The JSON object of one trace."""
    found: dict[str, object] = {}
    for rate in rates:
        requests = requests_of(trace, rate, count)
        row: dict[str, object] = {}
        means: dict[str, float] = {}
        for name in policies:
            began = time.monotonic()
            figures = run(world, make_system(name, SEED), requests)
            row[name] = {**asdict(figures), "seconds": round(time.monotonic() - began, 2)}
            means[name] = figures.ttft_mean_s
        row["bound_ttft_mean_s"] = bound(world, requests)
        if set(PUBLISHED) <= set(policies):
            row["published_order"] = all(means[slow] > means[fast] for slow, fast in pairwise(PUBLISHED))
        others = [name for name in policies if name != OURS]
        if OURS in policies and others:
            best = min(others, key=lambda name: means[name])
            row["best_other"] = best
            row["ours_over_best_ttft"] = means[OURS] / means[best]
        found[f"x{rate:g}"] = row
        show(f"{trace.name} x{rate:g}", row)
    first = found[f"x{rates[0]:g}"]
    assert isinstance(first, dict)
    if {OURS, "least_loaded"} <= set(policies):
        found["pooled_over_node_hit"] = first[OURS]["hit_rate"] / first["least_loaded"]["hit_rate"]
        print(f"hit rate, pooled over per node: {found['pooled_over_node_hit']:.2f}\n")
    return found


def over_all(results: Mapping[str, Mapping[str, object]], rates: Sequence[float], policies: Sequence[str]) -> dict[str, float]:
    """Ours over the best other, by the mean of all traces' mean TTFT."""
    ratios = {}
    for rate in rates:
        means = {name: fmean(result[f"x{rate:g}"][name]["ttft_mean_s"] for result in results.values()) for name in policies}  # type: ignore[index]
        ratios[f"x{rate:g}"] = means[OURS] / min(mean for name, mean in means.items() if name != OURS)
    return ratios


def admissions(world: World, requests: Sequence[SimRequest]) -> dict[str, object]:
    """Ours with each way of early rejection."""
    found: dict[str, object] = {}
    capacity = world.decode_tokens * world.decode_nodes
    for mode in Rejection:
        system = replace(make_system(OURS, SEED), help_tokens=0)
        found[str(mode)] = asdict(run(world, system, requests, EarlyRejection(mode, capacity)))
    return found


def show(title: str, row: Mapping[str, object]) -> None:
    """One table: a line a policy."""
    print(title)
    columns = (
        "ttft_mean_s",
        "ttft_p50_s",
        "ttft_p99_s",
        "goodput",
        "hit_rate",
        "imbalance",
        "busy",
        "rejected",
        "wasted_prefills",
        "load_swing",
    )
    lines = [[name, *(f"{value[c]:.4g}" for c in columns)] for name, value in row.items() if isinstance(value, dict)]
    print_table(["", *columns], lines)
    if "bound_ttft_mean_s" in row:
        print(f"bound {row['bound_ttft_mean_s']:.3f} s")
    if "ours_over_best_ttft" in row:
        print(f"ours over {row['best_other']}: {row['ours_over_best_ttft']:.3f}")
    print(flush=True)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(POLICIES) if text == "all" else tuple(text.split(","))
    for name in names:
        make_policy(name)
    return names


def _pair(text: str) -> tuple[int, int]:
    prefill, decode = map(int, text.split(","))
    return prefill, decode


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.routing", description="Routing policies on traces, in a simulated cluster.")
    parser.add_argument("--trace", action="append", required=True, help="a file that kvpool replay reads")
    parser.add_argument("--policy", default="all", help=f"all, or of {', '.join(POLICIES)}")
    parser.add_argument("--rates", type=lambda text: tuple(map(float, text.split(","))), default=(1.0, 2.0, 4.0), help="times as fast")
    parser.add_argument("--requests", type=int, help="only so many of each trace")
    parser.add_argument("--prefill", type=int, default=World().prefill_nodes, help="prefill nodes")
    parser.add_argument("--decode", type=int, default=World().decode_nodes, help="decode nodes")
    parser.add_argument("--admission", type=_pair, default=(14, 2), help="prefill,decode nodes where early rejection is compared; 0,0: not")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    try:
        policies = _names(args.policy)
        traces = [read_trace(Path(source)) for source in args.trace]
    except ConfigError as error:
        parser.error(str(error))
    world = replace(World(), prefill_nodes=args.prefill, decode_nodes=args.decode)
    began = time.monotonic()
    results = {trace.name: compare(world_of(trace, world), trace, policies, args.rates, args.requests) for trace in traces}
    told: dict[str, object] = dict(results)
    if OURS in policies and len(policies) > 1:
        told["ours_over_best_ttft"] = over_all(results, args.rates, policies)
        print("ours over the best other, all traces together:", told["ours_over_best_ttft"])
    if all(args.admission):
        split = replace(world, prefill_nodes=args.admission[0], decode_nodes=args.admission[1])
        rejections = admissions(world_of(traces[0], split), requests_of(traces[0], args.rates[-1], args.requests))
        told["admission"] = rejections
        show(f"{traces[0].name} x{args.rates[-1]:g}, {args.admission[0]} prefill and {args.admission[1]} decode nodes", rejections)
    told["seconds"] = round(time.monotonic() - began, 1)
    print(f"{told['seconds']} s")
    if args.json:
        print_json(told)


if __name__ == "__main__":
    main()
