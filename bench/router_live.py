"""Many requests with one cold prefix at once, over real processes and the small model: computed how often, spread how evenly?

`python -m bench.router_live [--requests 200] [--prefix 1500] [--json]` starts a local cluster (1 pool node, prefill and decode workers, a
router), warms it up with something else, then sends all requests in the same moment. Each has the same prefix, which nobody has seen, and
ten tokens of its own. Every answer says where the KV of its prompt came from, so what was computed is counted from the answers.

Keys: `failed`; `prefix_computed`, how many requests computed more than half of the prefix; `computed_over_least`, prompt tokens computed
over the least that would do (the prefix's whole blocks once, and what of each request is behind them); `worst_share`, requests of the
busiest decode worker over its share; `ttft_p50_s`, `ttft_p99_s`, `wall_s`. Exit status 0 if the prefix was computed once, none failed and
`worst_share` is at most 1.5.
"""

import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
import httpx

from bench.report import print_json, print_table
from kvpool.cli.procs import ClusterOptions, ProcessSpec, local_processes
from kvpool.cli.supervisor import LocalCluster
from kvpool.units import GIB

OWN_TOKENS = 10
WORST_SHARE = 1.5
_VOCABULARY = 40_000
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """One request: seconds to the whole answer, its status, and what the router says of it ({} when it failed)."""

    seconds: float
    status: int
    extension: dict[str, Any]


@click.command()
@click.option("--requests", default=200, show_default=True, type=click.IntRange(1))
@click.option("--prefix", default=1500, show_default=True, type=click.IntRange(64), help="Tokens that all have in common.")
@click.option("--decode", default=3, show_default=True, type=click.IntRange(1), help="Decode workers.")
@click.option("--prefill", default=1, show_default=True, type=click.IntRange(0), help="Prefill workers.")
@click.option("--max-tokens", default=4, show_default=True, type=click.IntRange(1))
@click.option("--active", default=4, show_default=True, type=click.IntRange(1), help="Requests that a decode worker serves at once.")
@click.option("--policy", default="ttft", show_default=True, help="Routing policy.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
def main(requests: int, prefix: int, decode: int, prefill: int, max_tokens: int, active: int, policy: str, as_json: bool) -> None:
    """Measure, print, compare."""
    options = ClusterOptions(port=0, capacity_bytes=GIB, decode=decode, prefill=prefill, request_timeout_s=_TIMEOUT_S, restart=False)

    def processes(options: ClusterOptions, url: str) -> Sequence[ProcessSpec]:
        more = {"router": ("--policy", policy), "decode": ("--max-active", str(active)), "prefill": ()}
        specs = local_processes(options, url)
        return [replace(spec, argv=(*spec.argv, *more.get(spec.role, ()))) for spec in specs]

    with LocalCluster(options, processes=processes) as cluster:
        cluster.wait_ready()
        rng = random.Random(time.time_ns())
        common = [rng.randrange(100, _VOCABULARY) for _ in range(prefix)]
        warm = [rng.randrange(100, _VOCABULARY) for _ in range(64)]
        asyncio.run(ask(cluster.url, [warm], max_tokens))
        began = time.monotonic()
        answers = asyncio.run(ask(cluster.url, prompts(common, requests, rng), max_tokens))
        wall_s = time.monotonic() - began
    found = figures(answers, prefix, decode, options.block_tokens) | {
        "wall_s": round(wall_s, 2),
        "policy": policy,
        "requests": requests,
        "prefix_tokens": prefix,
    }
    print_table(("what", "figure"), [(name, str(value)) for name, value in found.items()])
    for answer in answers:
        if answer.status == 200 and computed_tokens(answer.extension) > prefix / 2:
            print("computed more than half of the prefix:", answer.extension)
    if as_json:
        print_json(found)
    sys.exit(0 if good(found) else 1)


def prompts(common: Sequence[int], count: int, rng: random.Random) -> list[list[int]]:
    """The common prefix, and tokens of each request's own."""
    return [[*common, *(rng.randrange(100, _VOCABULARY) for _ in range(OWN_TOKENS))] for _ in range(count)]


async def ask(url: str, asked: Sequence[Sequence[int]], max_tokens: int) -> list[Answered]:
    """All at once."""
    limits = httpx.Limits(max_connections=len(asked))
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, limits=limits) as client:

        async def one(prompt: Sequence[int]) -> Answered:
            body = {"model": "smollm2", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
            began = time.monotonic()
            try:
                answer = await client.post("/v1/completions", json=body)
            except httpx.HTTPError:
                return Answered(seconds=time.monotonic() - began, status=0, extension={})
            extension = answer.json().get("kvpool", {}) if answer.status_code == 200 else {}
            return Answered(seconds=time.monotonic() - began, status=answer.status_code, extension=extension)

        return list(await asyncio.gather(*(one(prompt) for prompt in asked)))


def figures(answers: Sequence[Answered], prefix: int, workers: int, block_tokens: int) -> dict[str, Any]:
    """What the answers say. `workers`: how many could have decoded."""
    good = [answer for answer in answers if answer.status == 200]
    computed = [computed_tokens(answer.extension) for answer in good]
    shares = Counter(answer.extension["decode_worker"] for answer in good)
    first = sorted(answer.extension["times_ms"]["first_token"] / 1e3 for answer in good) or [0.0]
    least = prefix - prefix % block_tokens + (prefix % block_tokens + OWN_TOKENS) * len(answers)
    return {
        "failed": len(answers) - len(good),
        "prefix_computed": sum(tokens > prefix / 2 for tokens in computed),
        "computed_tokens": sum(computed),
        "computed_over_least": round(sum(computed) / least, 3),
        "worst_share": round(max(shares.values(), default=0) * workers / max(1, len(good)), 3),
        "ttft_p50_s": round(statistics.median(first), 3),
        "ttft_p99_s": round(first[min(len(first) - 1, int(len(first) * 0.99))], 3),
    }


def computed_tokens(extension: dict[str, Any]) -> int:
    """Prompt tokens that were computed for one request, in both phases."""
    computed = int(extension["sources"]["computed"])
    if extension["prefill_worker"] is not None and extension["decode_sources"] is not None:
        computed += int(extension["decode_sources"]["computed"])
    return computed


def good(found: dict[str, Any]) -> bool:
    """Whether it is as it must be."""
    return bool(found["failed"] == 0 and found["prefix_computed"] == 1 and found["worst_share"] <= WORST_SHARE)


if __name__ == "__main__":
    main()
