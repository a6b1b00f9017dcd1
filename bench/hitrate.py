"""Hit rates of every eviction policy on a request trace, beside LRU, Belady's bound and a store that never evicts.

`python -m bench.hitrate --trace PATH [--trace PATH2 ...] [--sizes 1000,3000,...] [--policies lru,...] [--processes 2] [--json]`.
A trace is a file that `kvpool replay` reads and that names blocks, such as Mooncake JSONL; a coding conversation or a folder of them; or
`synthetic:SEED` (`traces.py`). `replay.py` says what counts as a hit and how recompute seconds are reckoned. Sizes are in blocks. `ours`
is the policy registered as `value`.

JSON: `infinite` → figures; policy name, `belady` or `ours` → size → figures. Figures: `token_hit`, `block_hit`,
`recompute_seconds_saved`; at a size also `recompute_ratio_to_lru` and `gap_closed`, the part of the way from LRU to Belady in
token hits (null where there is no way to go). `trace` describes the input, `seconds` is how long it took. With several traces
there is one such object per trace name.
"""

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context

from bench.replay import Outcome, belady, infinite, references, replay
from bench.report import print_json, print_table
from bench.traces import read_trace
from kvpool.errors import ConfigError
from kvpool.policy.eviction import POLICIES, make_policy
from kvpool.replay.traces import Trace

SIZES = (1_000, 3_000, 5_860, 10_000, 30_000)
COMPARED = ("lru", "clock", "s3fifo", "lfu", "slru")
OURS = "value"

Figures = dict[str, float | None]
Table = dict[str, dict[str, Figures]]

_trace: Trace | None = None  # of a child process: inherited or sent once


def measure(trace: Trace, policies: Sequence[str], sizes: Sequence[int], processes: int = 1) -> dict[str, object]:
    """The JSON object of one trace. `policies`: names of the registry, `ours` for `value`, `belady`."""
    started = time.monotonic()
    jobs = [(name, size) for size in sizes for name in ("lru", "belady", *policies)]
    jobs = sorted(set(jobs), key=lambda job: (-_weight(job[0]), jobs.index(job)))  # the slow ones first
    if processes == 1:
        outcomes = [_outcome(trace, *job) for job in jobs]
    else:
        context = get_context("spawn")
        with ProcessPoolExecutor(processes, context, initializer=_set_trace, initargs=(trace,)) as pool:
            outcomes = list(pool.map(_of_child, jobs))
    found = dict(zip(jobs, outcomes, strict=True))
    table: Table = {}
    for name in dict.fromkeys(("lru", *policies, "belady")):
        table[name] = {str(size): _figures(*(found[who, size] for who in (name, "lru", "belady"))) for size in sizes}
    about = {"name": trace.name, "requests": len(trace.requests), "references": references(trace), "unique": trace.unique}
    about["block_tokens"] = trace.block_tokens
    return {"infinite": asdict(infinite(trace)), **table, "trace": about, "seconds": round(time.monotonic() - started, 2)}


def _weight(name: str) -> int:
    return {"ours": 3, OURS: 3, "s3fifo": 2, "prefix-lru": 2}.get(name, 1)


def _outcome(trace: Trace, name: str, size: int) -> Outcome:
    if name == "belady":
        return belady(trace, size)
    return replay(trace, make_policy(OURS if name == "ours" else name), size)


def _set_trace(trace: Trace) -> None:
    global _trace
    _trace = trace


def _of_child(job: tuple[str, int]) -> Outcome:
    assert _trace is not None
    return _outcome(_trace, *job)


def _figures(outcome: Outcome, lru: Outcome, bound: Outcome) -> Figures:
    way = bound.token_hit - lru.token_hit
    saved = lru.recompute_seconds_saved
    return {
        **asdict(outcome),
        "gap_closed": (outcome.token_hit - lru.token_hit) / way if way > 0 else None,
        "recompute_ratio_to_lru": outcome.recompute_seconds_saved / saved if saved else None,
    }


def show(result: Mapping[str, object], sizes: Sequence[int]) -> None:
    """Tables of one trace: token hit and recompute seconds saved, a row per policy, a column per size."""
    about, unbounded = result["trace"], result["infinite"]
    assert isinstance(about, dict)
    assert isinstance(unbounded, dict)
    print(f"{about['name']}: {about['requests']:,} requests, {about['references']:,} blocks asked for, {about['unique']:,} different")
    print(f"never evicting: token hit {unbounded['token_hit']:.4f}, block hit {unbounded['block_hit']:.4f}\n")
    rows = {name: value for name, value in result.items() if isinstance(value, dict) and str(sizes[0]) in value}
    print_table(
        ["token hit (gap closed)", *(f"{size:,}" for size in sizes)],
        [[name, *(_cell(row[str(size)], name) for size in sizes)] for name, row in rows.items()],
    )
    print()
    print_table(
        ["recompute seconds saved (to LRU)", *(f"{size:,}" for size in sizes)],
        [[name, *(_saved(row[str(size)]) for size in sizes)] for name, row in rows.items()],
    )
    print(f"\n{result['seconds']} s\n")


def _cell(figures: Figures, name: str) -> str:
    gap = figures["gap_closed"]
    return f"{figures['token_hit']:.4f}" + (f" ({100 * gap:+.0f} %)" if gap is not None and name not in ("lru", "belady") else "")


def _saved(figures: Figures) -> str:
    ratio = figures["recompute_ratio_to_lru"]
    return f"{figures['recompute_seconds_saved']:.0f}" + (f" ({ratio:.2f})" if ratio is not None else "")


def _names(text: str) -> tuple[str, ...]:
    for name in (names := tuple(text.split(","))):
        if name != "belady":
            make_policy(OURS if name == "ours" else name)
    return names


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(int(part.replace("_", "")) for part in text.split(","))
    if min(sizes) < 1:
        raise ValueError(text)
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.hitrate", description="Hit rates of every eviction policy on a trace.")
    ours = ("ours",) if OURS in POLICIES else ()
    parser.add_argument("--trace", action="append", required=True, help="a trace file, a folder of conversations, or synthetic:SEED")
    parser.add_argument("--sizes", type=_sizes, default=SIZES, help="blocks, separated by commas")
    parser.add_argument("--policies", default=",".join((*COMPARED, *ours)), help=f"of {', '.join(POLICIES)}, ours")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    if args.processes < 1:
        parser.error("--processes must be positive")
    try:
        policies = _names(args.policies)
        traces = [read_trace(source) for source in args.trace]
    except ConfigError as error:
        parser.error(str(error))
    if len({trace.name for trace in traces}) < len(traces):
        parser.error("two traces have the same name")
    results = {}
    for trace in traces:
        results[trace.name] = measure(trace, policies, args.sizes, args.processes)
        show(results[trace.name], args.sizes)
    if args.json:
        print_json(results if len(traces) > 1 else results[traces[0].name])


if __name__ == "__main__":
    main()
