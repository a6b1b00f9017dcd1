"""`kvpool verify`: read every block in every tier and check it against its checksum."""

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from kvpool.cli.options import cluster_option, json_option, node_option, print_json
from kvpool.errors import ConfigError
from kvpool.units import format_size, parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpool.cli.admin import Answers
    from kvpool.cli.scrub import Tally
    from kvpool.cluster import Member
    from kvpool.request.admin import TierReport
    from kvpool.wire.admin_client import AdminRpc

SHOWN_KEYS = 20
"""Corrupt keys printed for people; JSON has more."""


@click.command()
@click.option("--tier", default=None, metavar="NAME", help="Only this tier, as `kvpool tiers` names it.")
@click.option("--rate", default=None, metavar="SIZE", help="Most bytes a second that each node reads for this, for example 200MiB.")
@click.option("--within", default="1h", show_default=True, metavar="DURATION", help="Stop when it takes longer.")
@node_option
@cluster_option
@json_option
def verify(tier: str | None, rate: str | None, within: str, node: str | None, cluster: str | None, as_json: bool) -> None:
    """Read every block and check its checksum. A corrupt one is dropped by its node and listed here; it was never served.

    Exit code 0 when all was read and right, 3 when a corrupt block was found, 2 when a node did not answer or time ran out.
    """
    from kvpool.cli.admin import choose_nodes, finish, open_members

    rate_bytes = None if rate is None else parse_size(rate)
    if rate_bytes is not None and rate_bytes < 1:
        raise ConfigError("--rate must be above 0; leave it out for no limit")
    began, within_ns = time.monotonic_ns(), parse_duration(within)
    nodes = choose_nodes(open_members(cluster), node)
    tallies: list[Tally] = []
    answers = asyncio.run(_verify(nodes, tier, tallies, rate=rate_bytes, deadline_ns=began + within_ns, quiet=as_json))
    if tier is not None and not tallies and not answers.errors:
        names = sorted({known.name for some in answers.values.values() for known in some})
        raise ConfigError(f"no node has a tier {tier!r}; there are {', '.join(names) or 'none'}")
    tallies.sort(key=lambda tally: (tally.node, tally.tier))
    seconds = (time.monotonic_ns() - began) / 1e9
    if as_json:
        print_json({"tiers": [_as_json(tally) for tally in tallies], "seconds": round(seconds, 3), "errors": answers.errors})
    else:
        _show(tallies, answers, seconds, within)
    unread = {tally.node: "not done" for tally in tallies if not tally.done}
    finish({**unread, **answers.errors}, wrong=any(tally.corrupt_count for tally in tallies))


async def _verify(
    nodes: "Sequence[Member]", only: str | None, tallies: "list[Tally]", *, rate: int | None, deadline_ns: int, quiet: bool
) -> "Answers[list[TierReport]]":
    """Scrub all nodes at the same time, tier by tier; what was found goes to `tallies`, also when a node stops answering."""
    from kvpool.cli.admin import LOOK_TIMEOUT_S, ask_nodes
    from kvpool.cli.screen import short_id
    from kvpool.cli.scrub import Tally, scrub

    with _progress(quiet) as add_bar:

        async def ask(node: "Member", rpc: "AdminRpc") -> "list[TierReport]":
            known = await rpc.tiers(LOOK_TIMEOUT_S)
            for tier in known:
                if only in (None, tier.name):
                    tally = Tally(node=node.id, tier=tier.name)
                    tallies.append(tally)
                    on_step = add_bar(f"{short_id(node.id)} {tier.name}", tier.used_bytes)
                    await scrub(rpc, tally, rate=rate, deadline_ns=deadline_ns, on_step=on_step)
            return known

        return await ask_nodes(nodes, ask)


@contextmanager
def _progress(quiet: bool) -> Iterator["Callable[[str, int], Callable[[Tally], None]]"]:
    """Bars on standard error while something is read, if that is a terminal: called with a name and how many bytes there are."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    amount = DownloadColumn(binary_units=True)
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet or not sys.stderr.isatty()) as bars:

        def add_bar(name: str, total: int) -> "Callable[[Tally], None]":
            task = bars.add_task(escape(name), total=total)
            return lambda tally: bars.update(task, completed=tally.checked_bytes, total=max(total, tally.checked_bytes))

        yield add_bar


def _as_json(tally: "Tally") -> dict[str, Any]:
    return {
        "node": tally.node,
        "tier": tally.tier,
        "checked": tally.checked,
        "checked_bytes": tally.checked_bytes,
        "corrupt": [key.hex() for key in tally.corrupt],
        "corrupt_count": tally.corrupt_count,
        "done": tally.done,
    }


def _show(tallies: "Sequence[Tally]", answers: "Answers[Any]", seconds: float, within: str) -> None:
    from kvpool.cli.screen import console, new_table, plain, print_answers, short_id

    table = new_table("Scrub", ("node", "tier", "blocks", "bytes", "corrupt", "end"))
    for tally in tallies:
        corrupt = f"[red]{tally.corrupt_count}[/red]" if tally.corrupt_count else "[green]0[/green]"
        stopped = "no answer" if tally.node in answers.errors else f"stopped after {within}"
        who = (short_id(tally.node), plain(tally.tier))
        table.add_row(*who, str(tally.checked), format_size(tally.checked_bytes), corrupt, "done" if tally.done else stopped)
    blocks, corrupt_blocks = sum(tally.checked for tally in tallies), sum(tally.corrupt_count for tally in tallies)
    total = format_size(sum(tally.checked_bytes for tally in tallies))
    summary = f"{blocks} copies ({total}) read in {seconds:.1f} s, {corrupt_blocks} corrupt and dropped"
    print_answers(table, answers.errors, summary=summary)
    out = console()
    keys = [(tally, key) for tally in tallies for key in tally.corrupt]
    for tally, key in keys[:SHOWN_KEYS]:
        out.print(f"corrupt: {key.hex()} in {plain(tally.tier)} of {short_id(tally.node)}", highlight=False)
    if corrupt_blocks > SHOWN_KEYS:
        out.print(f"and {corrupt_blocks - SHOWN_KEYS} more", highlight=False)
