"""What the pool saves a stock vLLM: time to first token with no external cache, with kvpool's connector, and with LMCache.

`python -m bench.vllm [--vllm PYTHON] [--prefixes 4] [--prompts 8] [--prefix 1536] [--suffix 64] [--rounds 1] [--json]`. `--vllm` is the
interpreter of an environment with vLLM for CPUs and LMCache, by default the one of `make engines`.

One after the other, on one machine, each with its cache server beside it: a vLLM server takes the load of `vllm bench serve` with the
data set `prefix_repetition`, one request at a time, twice. The first pass fills the caches. Then the engine's own prefix cache is cleared,
and the same prompts come again: only the external cache can have them. vLLM's own prefix caching is on everywhere, so without an external
cache, too, the second prompt of a prefix finds what the first one left. `--rounds` repeats all of it in turns, with servers started anew.

Keys: `ttft_ms`: mean time to first token on the second pass, by contestant; `ttft_speedup`: without external cache / kvpool;
`over_lmcache`: LMCache / kvpool; `external_hit`: of the tokens of the second pass's prompts, those that kvpool brought, by vLLM's
counters, and `external_hit_lmcache`; `exact`: the part of greedy answers that are those of vLLM without an external cache and with the
prefix in its own: all of the second pass, and two to prompts of 1,000 tokens, of which the token ids are compared; `failed` requests. Exit
status 0 if the speed-up is at least 3, LMCache is not faster, and every answer is exact.

What vLLM computes of a prompt in one go differs in the last bits from what it computes behind a cached prefix, its own too, and in bfloat16
that turns some greedy answers. `exact` compares like with like, `exact_cold` with answers computed in one go.
"""

import json
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from bench.report import print_json, print_table, spread
from kvpool.config.models import resolve_model
from kvpool.testing.node_process import NodeProcess
from kvpool.testing.stock_process import LmcacheServer, VllmServer
from kvpool.units import SECOND

SPEEDUP = 3.0
CONTESTANTS = ("none", "kvpool", "lmcache")
_ROOT = Path(__file__).parents[1]
_CLIENT_S = 300.0
_SETTLE_S = 1.0
"""For what an engine still hands to its cache when the first pass is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What `vllm bench serve` is told of `prefix_repetition`: tokens of each prefix and suffix, prompts in all, tokens of each answer."""

    prefixes: int
    prompts: int
    prefix: int
    suffix: int
    answer: int = 8

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its answer, with room for what decoding and encoding again adds."""
        return (self.prefix + self.suffix) * 5 // 4 + self.answer

    def argv(self) -> list[str]:
        """Its flags."""
        words = ["--dataset-name", "prefix_repetition", "--num-prompts", str(self.prompts), "--ignore-eos", "--temperature", "0"]
        sizes = {"num-prefixes": self.prefixes, "prefix-len": self.prefix, "suffix-len": self.suffix, "output-len": self.answer}
        return words + [word for name, value in sizes.items() for word in (f"--prefix-repetition-{name}", str(value))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass of the load: mean time to first token, what was answered, requests that failed, tokens of prompts.

    `external_tokens` of these came from the external cache, `local_tokens` were in the engine's own.
    """

    ttft_ms: float
    answers: Sequence[str]
    failed: int
    prompt_tokens: float
    external_tokens: float
    local_tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one contestant did in one round; `tokens`: greedy answers to the long prompts, after the engine's cache was cleared.

    `again` and `tokens_again`: a third time, when all is in the engine's own cache.
    """

    first: Pass
    second: Pass
    tokens: Sequence[Sequence[int]]
    again: Pass | None
    tokens_again: Sequence[Sequence[int]]


@contextmanager
def engine(name: str, python: str, model: Path, logs: Path, load: Load) -> Iterator[VllmServer]:
    """A vLLM server with the external cache of that name, which runs beside it."""
    options: dict[str, Any] = {"env": {"PYTHONPATH": str(_ROOT)}, "max_model_len": max(2048, load.longest)}
    log = logs / f"{name}.log"
    if name == "none":
        with VllmServer(python, model, log, **options) as server:
            yield server
    elif name == "lmcache":
        with (
            LmcacheServer(python, logs / "lmcache-server.log") as cache,
            VllmServer(python, model, log, transfer=cache.transfer, **options) as server,
        ):
            yield server
    else:
        node = NodeProcess("--capacity", "1GiB")
        try:
            with VllmServer(python, model, log, transfer=transfer_config(node.address), **options) as server:
                yield server
        finally:
            node.stop()


def transfer_config(pool: str) -> dict[str, Any]:
    """What a vLLM that is to use the pool is given."""
    return {
        "kv_connector": "KvpoolConnector",
        "kv_connector_module_path": "kvpool.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pool": pool},
    }


def serve(server: VllmServer, python: str, model: Path, load: Load, result: Path) -> Pass:
    """One pass of `vllm bench serve`. Exits with its words when it fails."""
    argv = [python, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--base-url", server.url, "--model", "served"]
    argv += ["--tokenizer", str(model), "--max-concurrency", "1", "--seed", "1", "--save-result", "--save-detailed", *load.argv()]
    argv += ["--result-dir", str(result.parent), "--result-filename", result.name, "--disable-tqdm"]
    before = server.counters()
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=_CLIENT_S, check=False)
    if done.returncode != 0:
        sys.exit(f"vllm bench serve failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    said, after = json.loads(result.read_text()), server.counters()

    def grown(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    return Pass(
        ttft_ms=said["mean_ttft_ms"],
        answers=said["generated_texts"],
        failed=load.prompts - said["completed"],
        prompt_tokens=grown("vllm:prompt_tokens"),
        external_tokens=grown("vllm:external_prefix_cache_hits"),
        local_tokens=grown("vllm:prefix_cache_hits"),
    )


def contest(name: str, python: str, model: Path, logs: Path, load: Load) -> Found:
    """Both passes, then the long prompts, of one contestant."""
    rng = random.Random(7)
    prompts = [[rng.randrange(100, 20_000) for _ in range(1000)] for _ in range(2)]
    with engine(name, python, model, logs, load) as server:
        first = serve(server, python, model, load, logs / f"{name}-1.json")
        for prompt in prompts:
            server.complete(prompt, 16)
        time.sleep(_SETTLE_S)
        server.forget()
        second = serve(server, python, model, load, logs / f"{name}-2.json")
        tokens = [server.complete(prompt, 16)["tokens"] for prompt in prompts]
        again = serve(server, python, model, load, logs / f"{name}-3.json") if name == "none" else None
        tokens_again = [server.complete(prompt, 16)["tokens"] for prompt in prompts]
    return Found(first=first, second=second, tokens=tokens, again=again, tokens_again=tokens_again)


def exactness(found: Found, reference: Found, *, cold: bool = False) -> float:
    """The part of answers that are the reference's, which had the prefix in its own cache, or, `cold`, in none."""
    told = reference.second if cold or reference.again is None else reference.again
    tokens = reference.tokens if cold else reference.tokens_again
    pairs = [*zip(found.second.answers, told.answers, strict=True), *zip(found.tokens, tokens, strict=True)]
    return sum(one == other for one, other in pairs) / len(pairs)


def share(one: Pass) -> float:
    """Of a pass's tokens of prompts, those from the external cache."""
    return one.external_tokens / one.prompt_tokens


def summary(rounds: Sequence[Mapping[str, Found]]) -> dict[str, Any]:
    """The keys, medians over rounds; those of contestants that took no part are left out."""
    ttft = {name: spread([found[name].second.ttft_ms for found in rounds]) for name in rounds[0]}
    answer: dict[str, Any] = {
        "ttft_ms": {name: round(value.median, 1) for name, value in ttft.items()},
        "first_pass_ttft_ms": {name: round(statistics.median(found[name].first.ttft_ms for found in rounds), 1) for name in rounds[0]},
        "failed": sum(one.failed for found in rounds for each in found.values() for one in (each.first, each.second)),
    }
    for name, key in (("kvpool", "external_hit"), ("lmcache", "external_hit_lmcache")):
        if name in ttft:
            answer[key] = round(statistics.median(share(found[name].second) for found in rounds), 3)
    if {"none", "kvpool"} <= ttft.keys():
        answer["ttft_speedup"] = round(statistics.median(f["none"].second.ttft_ms / f["kvpool"].second.ttft_ms for f in rounds), 2)
        answer["exact"] = round(min(exactness(found["kvpool"], found["none"]) for found in rounds), 3)
        answer["exact_cold"] = round(min(exactness(found["kvpool"], found["none"], cold=True) for found in rounds), 3)
    if {"none", "lmcache"} <= ttft.keys():
        answer["exact_lmcache"] = round(min(exactness(found["lmcache"], found["none"]) for found in rounds), 3)
    if {"kvpool", "lmcache"} <= ttft.keys():
        answer["over_lmcache"] = round(statistics.median(f["lmcache"].second.ttft_ms / f["kvpool"].second.ttft_ms for f in rounds), 2)
    return answer


def table(rounds: Sequence[Mapping[str, Found]]) -> list[tuple[str, ...]]:
    """A row for each contestant: both passes, and where the second one's tokens came from."""
    rows = []
    for name in rounds[0]:
        second = [found[name].second for found in rounds]
        local = statistics.median(one.local_tokens / one.prompt_tokens for one in second)
        times = [str(spread([one.ttft_ms for one in passes])) for passes in ([found[name].first for found in rounds], second)]
        rows.append((name, *times, f"{statistics.median(map(share, second)):.3f}", f"{local:.3f}"))
    return rows


def good(answer: Mapping[str, Any]) -> bool:
    """Whether the pool saves what it should."""
    return not answer["failed"] and answer["ttft_speedup"] >= SPEEDUP and answer["over_lmcache"] >= 1.0 and answer["exact"] == 1.0


@click.command()
@click.option(
    "--vllm", default=str(_ROOT / ".venv-engines/bin/python"), envvar="KVPOOL_VLLM_PYTHON", help="Interpreter that has vLLM and LMCache."
)
@click.option("--model", default="smollm2", show_default=True, help="As the router's.")
@click.option("--prefixes", default=4, show_default=True, type=click.IntRange(1))
@click.option("--prompts", default=8, show_default=True, type=click.IntRange(1), help="In all.")
@click.option("--prefix", default=1536, show_default=True, type=click.IntRange(128), help="Tokens that prompts share.")
@click.option("--suffix", default=64, show_default=True, type=click.IntRange(1), help="Tokens of each prompt's own.")
@click.option("--only", multiple=True, type=click.Choice(CONTESTANTS), help="Measure some of them.")
@click.option("--rounds", default=1, show_default=True, type=click.IntRange(1))
@click.option("--logs", default=None, type=click.Path(path_type=Path, file_okay=False), help="Keep the servers' logs here.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
def main(vllm: str, model: str, only: Sequence[str], rounds: int, logs: Path | None, as_json: bool, **sizes: int) -> None:
    """Measure, print, compare."""
    if not Path(vllm).exists():
        raise click.ClickException(f"no interpreter {vllm}: run `make engines`, or name one with --vllm")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the servers, too
    directory = resolve_model(model, deadline_ns=time.monotonic_ns() + 600 * SECOND)
    load, taken = Load(**sizes), []
    with TemporaryDirectory() as temporary:
        place = logs or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        for number in range(rounds):
            taken.append({name: contest(name, vllm, directory, place, load) for name in only or CONTESTANTS})
            print(f"round {number + 1} of {rounds}", flush=True)
    answer = summary(taken)
    print_table(("external cache", "first pass, mean TTFT ms", "second pass", "its prompts: external", "own cache"), table(taken))
    if as_json:
        print_json(answer)
    sys.exit(0 if only or good(answer) else 1)


if __name__ == "__main__":
    main()
