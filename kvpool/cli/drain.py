"""`kvpool drain`: move all blocks of a node to others, so that it can be stopped without losing a hit."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from kvpool.cli.options import cluster_option, json_option, print_json
from kvpool.clock import seconds_left
from kvpool.errors import ConfigError
from kvpool.units import format_size, parse_duration, parse_size

if TYPE_CHECKING:
    from kvpool.cluster import Member
    from kvpool.request.admin import Balance
    from kvpool.wire.admin_client import AdminRpc

_POLL_S = 0.2


@click.command()
@click.argument("node", metavar="NODE")
@click.option("--deadline", default="10m", show_default=True, metavar="DURATION", help="Stop waiting when it takes longer.")
@click.option("--rate", default=None, metavar="SIZE", help="Most bytes a second that it pushes, for example 200MiB/s; as the config says.")
@click.option("--cancel", is_flag=True, help="Have it serve as before instead.")
@cluster_option
@json_option
def drain(node: str, deadline: str, rate: str | None, cancel: bool, cluster: str | None, as_json: bool) -> None:
    """Move all blocks of NODE (the start of its id is enough) to other nodes.

    The node takes no more writes, pushes what it holds and goes on serving it. When this ends with exit code 0, every block of it is on the
    nodes that own it from now on, and it can be stopped. Interrupted or out of time, the node goes on; the same command again
    waits on, also after the node was restarted.

    Exit code 0 when all is moved, 3 when some blocks stay (no room elsewhere, or a gap in their chain hides where they belong), 2 when
    the node did not answer or time ran out.
    """
    from kvpool.cli.admin import ask_nodes, choose_nodes, finish, open_members

    bytes_per_s = 0 if rate is None else parse_size(rate.strip().removesuffix("/s"))
    if rate is not None and bytes_per_s < 1:
        raise ConfigError("--rate must be above 0; leave it out for what the cluster's config says")
    began_ns = time.monotonic_ns()
    deadline_ns = began_ns + parse_duration(deadline)
    members = open_members(cluster)
    (chosen,) = choose_nodes(members, node)
    if not cancel:
        _check_others(members, chosen)
    latest: list[Balance] = []

    async def ask(_: "Member", rpc: "AdminRpc") -> None:
        with _progress(quiet=as_json) as show:
            await _drain(rpc, latest, cancel=cancel, bytes_per_s=bytes_per_s, deadline_ns=deadline_ns, show=show)

    answers = asyncio.run(ask_nodes([chosen], ask))
    report = latest[-1] if latest else None
    seconds = (time.monotonic_ns() - began_ns) / 1e9
    homeless = 0 if report is None or cancel or not report.settled else _homeless(report)
    done = report is not None and (cancel or (report.settled and not homeless))
    if as_json:
        print_json(_as_json(chosen.id, report, done, seconds, answers.errors))
    else:
        _show(chosen.id, report, homeless, seconds, deadline, answers.errors, cancel=cancel)
    late = {} if done or homeless else {chosen.id: "not done"}
    finish({**late, **answers.errors}, wrong=homeless > 0)


async def _drain(
    rpc: "AdminRpc", latest: "list[Balance]", *, cancel: bool, bytes_per_s: int, deadline_ns: int, show: "Callable[[Balance], None]"
) -> None:
    """Ask for it and wait; what the node said last is the last of `latest`."""
    from kvpool.cli.admin import LOOK_TIMEOUT_S

    latest.append(await rpc.drain(LOOK_TIMEOUT_S, cancel=cancel, bytes_per_s=bytes_per_s))
    while not cancel and not latest[-1].settled and seconds_left(deadline_ns):
        show(latest[-1])
        await asyncio.sleep(min(_POLL_S, seconds_left(deadline_ns)))
        latest[:] = [await rpc.balance(LOOK_TIMEOUT_S)]
        if latest[-1].state != "draining":
            raise ConfigError(f"the node is {latest[-1].state} again: somebody else cancelled this, or it was restarted")
    show(latest[-1])


def _check_others(members: "tuple[Member, ...]", chosen: "Member") -> None:
    """Raise `ConfigError` when there is nobody who could take the blocks."""
    others = [member for member in members if member.role == "node" and member.id != chosen.id]
    if not any(member.info.get("state", "active") in ("active", "joining") for member in others):
        raise ConfigError("there is no other active node that could take its blocks; start one first")


@contextmanager
def _progress(*, quiet: bool) -> "Iterator[Callable[[Balance], None]]":
    """A bar on standard error while blocks move, if that is a terminal: of the bytes that the node holds, those that are safe."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("safe elsewhere"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty()) as bars:
        task = bars.add_task("drain", total=None)
        yield lambda report: bars.update(task, completed=report.safe_bytes, total=report.block_bytes or None)


def _homeless(report: "Balance") -> int:
    """Blocks that stay on the node alone: other nodes had no room for them, or nobody can say where they belong."""
    return max(0, report.blocks - report.safe_blocks)


def _why(report: "Balance", homeless: int) -> str:
    """What became of those blocks, in words."""
    adrift = min(homeless, report.counters.get("adrift", 0))
    reasons = {
        "found no room on other nodes": homeless - adrift,
        "lie behind a gap in their chain, so that no node can be told to own them": adrift,
    }
    return " and ".join(f"{count} blocks {reason}" for reason, count in reasons.items() if count)


def _as_json(node: str, report: "Balance | None", done: bool, seconds: float, errors: dict[str, str]) -> dict[str, Any]:
    from dataclasses import asdict

    said = None if report is None else {**asdict(report), "counters": dict(report.counters)}
    return {"node": node, "done": done, "balance": said, "seconds": round(seconds, 3), "errors": errors}


def _show(
    node: str, report: "Balance | None", homeless: int, seconds: float, deadline: str, errors: dict[str, str], *, cancel: bool
) -> None:
    from kvpool.cli.screen import new_table, print_answers, short_id

    name = short_id(node)
    if report is None:
        summary = f"{name} was not drained"
    elif cancel:
        summary = f"{name} is {report.state} and takes part as before"
    elif homeless:
        summary = f"[red]not all of {name} is moved[/red]: {_why(report, homeless)}; the rest is moved"
    elif report.settled:
        summary = f"[green]{name} is drained[/green] after {seconds:.1f} s: stop it when you like"
    else:
        summary = f"[yellow]{name} is not drained yet[/yellow] after {deadline}; it goes on, and the same command waits on"
    table = new_table("Drain", ("node", "state", "blocks", "safe elsewhere", "pushed", "failed"))
    if report is not None:
        counters = report.counters
        safe = f"{report.safe_blocks} ({format_size(report.safe_bytes)})"
        pushed = f"{counters.get('pushed', 0)} ({format_size(counters.get('pushed_bytes', 0))})"
        table.add_row(
            name, report.state, f"{report.blocks} ({format_size(report.block_bytes)})", safe, pushed, str(counters.get("push_failed", 0))
        )
    print_answers(table, errors, summary=summary)
