"""`kvpool replay TRACE`: a trace sent to a router, or run through a simulated cluster."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvpool.cli.options import cluster_option, json_option, print_json
from kvpool.cli.routers import router_url
from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from kvpool.replay.traces import Trace

_LIVE = ("router", "model", "block_tokens", "max_open", "timeout")


@click.command()
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--against", type=click.Choice(["live", "sim"]), required=True, help="A router, or a simulated cluster.")
@click.option("--policy", multiple=True, help="sim: policies to compare, or all; by default ours.")
@click.option("--speed", default=1.0, show_default=True, help="How many times as fast as the trace.")
@click.option("--limit", default=None, type=click.IntRange(1), help="Only the first so many requests.")
@click.option("--seed", default=0, show_default=True, help="For what is drawn: prompts, and policies that draw.")
@click.option("--router", metavar="URL", default=None, help="live: the router; by default the only one of the cluster.")
@click.option("--model", default=None, help="live: served model name; by default the one that the router serves.")
@click.option("--block-tokens", default=None, type=click.IntRange(1), help="live: tokens that a block of the trace becomes.")
@click.option("--max-open", default=1024, show_default=True, type=click.IntRange(1), help="live: requests at once at most.")
@click.option("--timeout", default=300.0, show_default=True, help="live: seconds that an answer may take.")
@cluster_option
@json_option
def replay(trace: Path, against: str, as_json: bool, **flags: Any) -> None:
    """Replay TRACE: a recording of `kvpool record`, Mooncake JSONL, Qwen-Bailian JSONL or Azure CSV.

    Exit code 0 when every request was answered, 3 when some failed.
    """
    from kvpool.replay.traces import read_trace

    if not 0 < flags["speed"] < float("inf"):
        raise ConfigError(f"--speed must be above 0, got {flags['speed']}")
    found = read_trace(trace, limit=flags["limit"])
    result = _live(found, flags) if against == "live" else _sim(found, flags)
    told = {"trace": _about(found), "against": against, **result}
    if as_json:
        print_json(told)
    else:
        _show(told)
    if result.get("failed"):
        raise SystemExit(3)


def _live(trace: "Trace", flags: dict[str, Any]) -> dict[str, Any]:
    from kvpool.cli.credentials import https_context, security
    from kvpool.cli.http import authorization
    from kvpool.replay.live import Caller, Endpoint, Plan, report, run

    if flags["policy"]:
        raise ConfigError("a router chooses its policy when it starts (python -m router --policy NAME); --policy is for --against sim")
    url, credentials = router_url(flags["router"], flags["cluster"]), security()
    tls = https_context(credentials) if url.startswith("https:") else None
    plan = Plan(
        speed=flags["speed"], size=flags["block_tokens"], max_open=flags["max_open"], timeout_s=flags["timeout"], seed=flags["seed"]
    )
    caller = Caller(Endpoint(url=url, headers=authorization(url, credentials), tls=tls))
    return asdict(report(asyncio.run(run(caller, trace, plan, flags["model"]))))


def _sim(trace: "Trace", flags: dict[str, Any]) -> dict[str, Any]:
    from kvpool.policy.routing.names import OURS, POLICIES
    from kvpool.replay.simulate import simulate

    context = click.get_current_context()
    for name in _LIVE:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise ConfigError(f"--{name.replace('_', '-')} is for --against live")
    names = list(POLICIES) if "all" in flags["policy"] else list(flags["policy"]) or [OURS]
    return {"policies": {name: asdict(simulate(trace, name, speed=flags["speed"], seed=flags["seed"])) for name in names}}


def _about(trace: "Trace") -> dict[str, Any]:
    return {
        "name": trace.name,
        "format": trace.format,
        "requests": len(trace.requests),
        "seconds": round(trace.seconds, 3),
        "block_tokens": trace.block_tokens,
        "blocks": trace.unique,
        "shared": round(trace.shared_tokens / trace.prompt_tokens, 4),
        "lost": trace.lost,
    }


def _show(told: dict[str, Any]) -> None:
    from kvpool.cli.screen import console, new_table, plain

    about = told["trace"]
    click.echo(
        f"{about['name']} ({about['format']}): {about['requests']} requests in {about['seconds']:.0f} s, "
        f"{100 * about['shared']:.1f} % of their prompts' tokens came before"
    )
    if "policies" in told:
        figures = next(iter(told["policies"].values()))
        table = new_table("Simulated", ("policy", *figures))
        for name, outcome in told["policies"].items():
            table.add_row(plain(name), *(_number(value) for value in outcome.values()))
    else:
        table = new_table("Live", ("figure", "value"))
        for name, value in told.items():
            if isinstance(value, dict):
                value = ", ".join(f"{code} {count}" for code, count in value.items()) or "none"
            if name not in ("trace", "against"):
                table.add_row(name, _number(value))
    console().print(table)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
