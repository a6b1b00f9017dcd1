"""How a cluster looks on a terminal: rich tables made from a snapshot. Who didn't answer is named in the table, why stands below it."""

import sys
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpool.cli.snapshot import NodeReport, RouterReport, WorkerReport, offers
from kvpool.cli.table import ProcessRow
from kvpool.units import format_size

_SHORT_ID = 8
_PIPE_WIDTH = 200
_NO_ANSWER = "[red]no answer[/red]"
_STATES = {"active": "green", "quarantined": "red"}


def console() -> Console:
    """Standard output: as wide as the terminal, or wide enough to fold nothing where there is none."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def nodes_table(reports: tuple[NodeReport, ...]) -> Table:
    """State, memory, blocks, leases and hits of each pool node."""
    table = new_table(
        "Pool nodes", ("node", "address", "state", "fill", "used", "pinned", "free", "blocks", "leases r/w", "hits", "misses", "offers")
    )
    for report in reports:
        who = (short_id(report.member.id), report.member.address, f"[{_STATES.get(report.state, 'yellow')}]{report.state}[/]")
        node = report.description
        if node is None:
            table.add_row(*who, _NO_ANSWER)
            continue
        fill = 100 * (node.capacity_bytes - node.free_bytes) / max(1, node.capacity_bytes)
        sizes = (format_size(node.used_bytes), format_size(node.pinned_bytes), format_size(node.free_bytes))
        leases = f"{node.read_leases}/{node.write_leases}"
        counts = (str(node.blocks), leases, str(node.counters.get("hits", 0)), str(node.counters.get("misses", 0)))
        table.add_row(*who, f"{fill:.1f} %", *sizes, *counts, " ".join(offers(node)))
    return _with_reasons(table, reports)


def workers_table(reports: tuple[WorkerReport, ...]) -> Table:
    """Load, speed and the reach in use to each node, per worker."""
    table = new_table("Workers", ("worker", "role", "address", "model", "active", "queued", "done", "failed", "prefill tok/s", "reach"))
    for report in reports:
        who = (short_id(report.member.id), report.member.role, report.member.address)
        status = report.status
        if status is None:
            table.add_row(*who, _NO_ANSWER)
            continue
        reaches = ", ".join(f"{node[:_SHORT_ID]}:{reach}" for node, reach in sorted(status.reaches.items())) or "-"
        load = (str(status.active_requests), str(status.queued_requests), str(status.finished_requests), str(status.failed_requests))
        table.add_row(*who, status.model, *load, f"{status.prefill_tokens_per_s:.0f}" if status.prefill_tokens_per_s else "-", reaches)
    return _with_reasons(table, reports)


def routers_table(reports: tuple[RouterReport, ...]) -> Table:
    """URL and health of each router."""
    table = new_table("Routers", ("router", "url", "health"))
    for report in reports:
        table.add_row(short_id(report.member.id), report.url, "[red]unhealthy[/red]" if report.error else "[green]healthy[/green]")
    return _with_reasons(table, reports)


def processes_table(rows: tuple[ProcessRow, ...]) -> Table:
    """What `kvpool up` keeps running."""
    table = new_table("Processes", ("process", "pid", "state", "for", "deaths", "last exit"))
    colours = {"running": "green", "waiting": "yellow", "ended": "red"}
    for row in rows:
        state = f"[{colours[row.state]}]{row.state}[/]"
        table.add_row(row.name, str(row.pid or "-"), state, f"{row.since_s:.0f} s", str(row.deaths), row.last_exit or "-")
    return table


def new_table(title: str, columns: tuple[str, ...]) -> Table:
    """An empty table in the house's dress; long words fold."""
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _with_reasons(table: Table, reports: Sequence[NodeReport | WorkerReport | RouterReport]) -> Table:
    table.caption = _reasons({report.member.id: report.error for report in reports if report.error}) or None
    return table


def print_answers(table: Table, errors: Mapping[str, str], *, summary: str = "") -> None:
    """To standard output: a line of markup that says what matters, a table, and why members (by id) are missing from it."""
    out = console()
    for part in (summary, table, _reasons(errors)):
        if part:
            out.print(part, highlight=False)


def _reasons(errors: Mapping[str, str]) -> str:
    return "\n".join(plain(f"{short_id(member)}: {' '.join(error.split())[:300]}") for member, error in errors.items())


def plain(text: str) -> str:
    """Somebody else's text, safe to print: no markup, nothing a terminal would act on."""
    return escape("".join(letter if letter.isprintable() else "�" for letter in text))


def short_id(member_id: str) -> str:
    """A member's id as people see it; `--node` takes it."""
    return member_id[:_SHORT_ID]
