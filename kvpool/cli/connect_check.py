"""`kvpool connect-check ENGINE`: whether an engine will use the pool, before it is started."""

import asyncio
import os
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from kvpool.cli.options import print_json

if TYPE_CHECKING:
    from kvpool.connectors.check.lines import Line
    from kvpool.connectors.check.pool import NodeSeen

POOL_TIMEOUT_S = 5.0
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command(name="connect-check")
@click.argument("engine", type=click.Choice(["vllm", "sglang", "lmcache"]))
@click.option("--python", default=sys.executable, metavar="FILE", help="The engine's interpreter; by default this one.")
@click.option(
    "--pool", metavar="WHERE", default=None, help="host:port[,host:port] or a cluster URL, where the configuration doesn't say it."
)
@click.option("--config", metavar="JSON", default=None, help="vLLM's transfer config, SGLang's backend extra config, LMCache's L2 adapter.")
@click.option("--timeout", "timeout_s", default=180.0, show_default=True, type=click.FloatRange(1), help="Seconds for the engine's part.")
@click.option("-o", "--output", default="table", show_default=True, type=click.Choice(["table", "json"]))
@click.option("--json", "output", flag_value="json", help="The same as -o json.")
@click.argument("flags", metavar="[-- ENGINE FLAGS]", nargs=-1)
def connect_check(
    engine: str, python: str, pool: str | None, config: str | None, timeout_s: float, output: str, flags: Sequence[str]
) -> None:
    """Tell what will and what won't work between an engine and the pool, before it is started.

    ENGINE FLAGS are those the engine is to be started with; the configuration may be among them. Nothing is started, and nothing is
    written to the pool. Exit code 0 when all will work (see the warnings), 3 when something won't.
    """
    from kvpool.cli.credentials import security
    from kvpool.connectors.check.engines import ENGINES
    from kvpool.connectors.check.pool import look
    from kvpool.connectors.check.run import probe
    from kvpool.errors import KvpoolError

    plan = ENGINES[engine](config, pool, flags)
    nodes: list[NodeSeen] | None = None
    trouble = ""
    try:
        if plan.pool:
            nodes = asyncio.run(look(plan.pool, plan.transport, security(), POOL_TIMEOUT_S))
    except (KvpoolError, TimeoutError) as error:
        trouble = str(error) or f"{plan.pool} did not answer in time"
    lines = plan.lines(probe(python, plan.asked, timeout_s), nodes, trouble, os.environ)
    if output == "json":
        print_json({"engine": engine, "lines": [line.as_json() for line in lines], "start_with": plan.start_with})
    else:
        _show(engine, lines, plan.start_with)
    if any(line.state == "fail" for line in lines):
        raise SystemExit(3)


def _show(engine: str, lines: "Sequence[Line]", start_with: "Sequence[str]") -> None:
    from kvpool.cli.screen import console, new_table, plain

    table = new_table(f"{engine} and the pool", ("what", "", "found", "what to do"))
    for line in lines:
        table.add_row(line.what, f"[{_COLOURS[line.state]}]{line.state}[/]", plain(line.found), plain(line.todo) or "-")
    out = console()
    out.print(table)
    if start_with and not any(line.state == "fail" for line in lines):
        out.print(plain("start it with " + shlex.join(start_with)), highlight=False, soft_wrap=True)
