"""Cold against warm time to first token over a long shared prefix, on a whole local cluster, and where the warm time goes.

`python -m bench.ttft [--rounds 3] [--json]`: each round asks twice over a document nobody has seen before. The first request is
cold: its prefix is computed. The second asks something else over the same document: its prefix is loaded from the pool (workers
keep no KV of finished requests here; `--resident` lets them). Times are the client's, from sending the request to the first
text. Every answer is compared with plain `transformers` without cache.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import click

from bench.report import print_json, print_table, spread
from kvpool.cli.conversation import DOCUMENT, Conversation, Exchange
from kvpool.cli.demo import reference_answers
from kvpool.cli.procs import ClusterOptions
from kvpool.cli.supervisor import LocalCluster
from kvpool.units import GIB, MIB

QUESTIONS = ("What is the single most important sentence of this handbook?", "How many keepers live at the station?")
STAGES = ("tokenize", "route", "queue", "load", "compute", "sample")
LEAST_PREFIX = 1500


@dataclass(frozen=True, slots=True)
class Round:
    """A cold and a warm request over one document."""

    cold: Exchange
    warm: Exchange


@click.command()
@click.option("--rounds", default=3, show_default=True)
@click.option("--transport", default="auto", show_default=True, type=click.Choice(["auto", "shm", "ucx", "tcp", "grpc"]))
@click.option("--max-tokens", default=16, show_default=True)
@click.option("--resident", is_flag=True, help="Let workers keep KV of finished requests instead of loading from the pool.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
def main(rounds: int, transport: str, max_tokens: int, resident: bool, as_json: bool) -> None:
    """Measure, print, compare."""
    options = ClusterOptions(port=0, capacity_bytes=GIB, transport=transport, resident_bytes=512 * MIB if resident else 0)
    done = measure(options, rounds, max_tokens)
    cold, warm = spread([r.cold.reply.ttft_s for r in done]), spread([r.warm.reply.ttft_s for r in done])
    exact = all_exact(done, max_tokens)
    ratio = cold.median / warm.median
    prefix = min(r.warm.shared_tokens for r in done)
    print_table(
        ("request", "TTFT s, median (range)", "prompt tokens", "cached"),
        [
            ("cold", cold, tokens(done, "cold"), cached(done, "cold")),
            ("warm", warm, tokens(done, "warm"), cached(done, "warm")),
        ],
    )
    print(f"shared prefix {prefix} tokens, ratio {ratio:.1f}, answers {'equal' if exact else 'NOT equal'} to a run without cache\n")
    parts = warm_parts(done)
    print_table(("where the warm time goes", "ms, median"), [(name, f"{value:.1f}") for name, value in parts.items()])
    if as_json:
        print_json({
            "ttft_cold_s": cold.median, "ttft_warm_s": warm.median, "ratio": ratio, "exact": exact, "prefix_tokens": prefix,
            "rounds": len(done), "transport": transport, "resident": resident, "warm_ms": parts,
        })  # fmt: skip
    sys.exit(0 if exact and prefix >= LEAST_PREFIX else 1)


def measure(options: ClusterOptions, rounds: int, max_tokens: int) -> list[Round]:
    """Run the rounds on a cluster of their own."""
    document = DOCUMENT.read_text()
    done = []
    with LocalCluster(options) as cluster:
        cluster.wait_ready()
        warm_up = Conversation(cluster.url, "A short note.", max_tokens=4)
        warm_up.ask("warm-up", "Hello?")
        for number in range(rounds):
            talk = Conversation(cluster.url, f"Copy number {number}.\n\n{document}", max_tokens=max_tokens)
            done.append(Round(talk.ask("first reader", QUESTIONS[0]), talk.ask("second reader", QUESTIONS[1])))
    return done


def all_exact(done: Sequence[Round], max_tokens: int) -> bool:
    """Whether each answer equals, token for token, that of one process without cache."""
    exchanges = [exchange for r in done for exchange in (r.cold, r.warm)]
    answers = reference_answers([e.prompt for e in exchanges], model="smollm2", max_tokens=max_tokens)
    return all(e.reply.tokens == tuple(answer) for e, answer in zip(exchanges, answers, strict=True))


def warm_parts(done: Sequence[Round]) -> dict[str, float]:
    """Median milliseconds of each stage of the warm requests; `other` is HTTP, gRPC and waiting between them."""
    times = [r.warm.reply.extension["times_ms"] for r in done]
    parts = {stage: spread([t[stage] for t in times]).median for stage in STAGES}
    first = spread([r.warm.reply.ttft_s * 1e3 for r in done]).median
    return {**parts, "other": max(0.0, first - sum(parts.values())), "first text at the client": first}


def tokens(done: Sequence[Round], which: str) -> str:
    return str(max(getattr(r, which).reply.prompt_tokens for r in done))


def cached(done: Sequence[Round], which: str) -> str:
    return str(min(getattr(r, which).reply.cached_tokens for r in done))


if __name__ == "__main__":
    main()
