"""`kvpool demo`: a whole cluster, a real conversation, and the proof that every answer is right."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from kvpool.cli.conversation import DOCUMENT, SCRIPT, Conversation, Exchange
from kvpool.cli.procs import ClusterOptions
from kvpool.cli.ray_flags import RayFlags, make_cluster
from kvpool.errors import ConfigError, KvpoolError
from kvpool.units import MIB

LEAST_CACHED = 0.9
"""From the second request on, at least this share of what was seen before must come from the cache."""
_REFERENCE_TIMEOUT_S = 600
_PLAIN_WIDTH = 130
"""Columns when the output is not a terminal."""


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="smollm2, a Hugging Face directory or a .gguf file.")
@click.option("--max-tokens", default=48, show_default=True, help="Tokens per answer.")
@click.option("--transport", default="auto", show_default=True, type=click.Choice(["auto", "shm", "ucx", "tcp", "grpc"]))
@click.option("--document", type=click.File("r"), default=str(DOCUMENT), help="Text the conversation is about.")
@click.option("--ray", default=None, type=click.Choice(["local"]), help="Let Ray place the processes.")
def demo(model: str, max_tokens: int, transport: str, document: Any, ray: str | None) -> None:
    """Serve a conversation on a fresh local cluster and prove its answers."""
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    try:
        ok = run_demo(console, model, max_tokens, transport, document.read(), ray)
    except KvpoolError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(0 if ok else 1)


def run_demo(console: Console, model: str, max_tokens: int, transport: str, document: str, ray: str | None = None) -> bool:
    """Cluster, conversation, table, proof; whether all held."""
    options = ClusterOptions(model=model, port=0, capacity_bytes=512 * MIB, transport=transport)
    console.print(f"Starting a cluster: 1 pool node, 1 prefill worker, 1 decode worker, 1 router (model {model}) …")
    began = time.monotonic()
    with make_cluster(options, RayFlags(ray=ray)) as cluster:
        cluster.wait_ready()
        console.print(f"Up after {time.monotonic() - began:.0f} s at {cluster.url}; logs in {cluster.log_dir}")
        conversation = Conversation(cluster.url, document, max_tokens=max_tokens)
        for client, question in SCRIPT:
            exchange = conversation.ask(client, question)
            console.print(f"\n[bold]{client}[/bold]: {question}\n[dim]→ {' '.join(exchange.reply.text.split())}[/dim]", highlight=False)
    console.print()
    console.print(exchange_table(conversation.exchanges))
    return _judge_cache(console, conversation.exchanges) & _judge_answers(console, conversation.exchanges, model, max_tokens)


def exchange_table(exchanges: Sequence[Exchange]) -> Table:
    """What each request cost and who served it.

    `cached` are prompt tokens the prefill did not compute (from the pool or still in the worker), `pulled` what the decode worker
    then took from the pool.
    """
    table = Table(title="Requests", title_justify="left")
    for name in ("#", "client", "prompt", "seen before", "cached", "pulled", "TTFT", "tokens/s", "prefill worker", "decode worker"):
        table.add_column(name, justify="left" if "worker" in name or name == "client" else "right")
    for number, exchange in enumerate(exchanges, 1):
        reply = exchange.reply
        table.add_row(
            str(number),
            exchange.client,
            str(reply.prompt_tokens),
            str(exchange.shared_tokens),
            f"{reply.cached_tokens} ({reply.cached_tokens / reply.prompt_tokens:.0%})",
            str((reply.extension.get("decode_sources") or {}).get("pool", "–")),
            f"{reply.ttft_s:.2f} s",
            f"{reply.tokens_per_s:.1f}",
            _name(reply.extension.get("prefill_worker")),
            _name(reply.extension.get("decode_worker")),
        )
    return table


def _judge_cache(console: Console, exchanges: Sequence[Exchange]) -> bool:
    short = [number for number, e in enumerate(exchanges, 1) if number > 1 and e.cached_share < LEAST_CACHED]
    least = min(e.cached_share for e in exchanges[1:])
    console.print(f"Cache: from the second request on at least {least:.1%} of the tokens seen before were not computed again.")
    if short:
        console.print(f"[red]Below {LEAST_CACHED:.0%} in request {', '.join(map(str, short))}.[/red]")
    return not short


def _judge_answers(console: Console, exchanges: Sequence[Exchange], model: str, max_tokens: int) -> bool:
    """Compare with one process that has no cache: plain `transformers` over the whole prompt."""
    console.print("Proof: recomputing every answer in one process, without cache …")
    answers = reference_answers([e.prompt for e in exchanges], model=model, max_tokens=max_tokens)
    wrong = [number for number, (e, answer) in enumerate(zip(exchanges, answers, strict=True), 1) if e.reply.tokens != tuple(answer)]
    if wrong:
        console.print(f"[red]Different tokens in request {', '.join(map(str, wrong))}.[/red]")
        return False
    tokens = sum(len(answer) for answer in answers)
    console.print(f"[green]All {len(answers)} answers are equal, token for token ({tokens} tokens).[/green]")
    return True


def reference_answers(prompts: Sequence[Sequence[int]], *, model: str, max_tokens: int) -> list[list[int]]:
    """What one process without cache, plain `transformers`, answers to `prompts` (token ids), greedily."""
    lines = "".join(json.dumps({"prompt": list(prompt), "max_tokens": max_tokens}) + "\n" for prompt in prompts)
    command = [sys.executable, "-m", "kvpool.engine.reference", "--model", model]
    try:
        done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=_REFERENCE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"the reference run took longer than {_REFERENCE_TIMEOUT_S} s; use a shorter document") from error
    if done.returncode:
        raise ConfigError(f"the reference run failed:\n{done.stderr[-2000:]}")
    return [json.loads(line)["tokens"] for line in done.stdout.splitlines()]


def _name(worker: object) -> str:
    return str(worker)[:8] if worker else "–"
