"""`kvpool gc`: end what has run out and give dead room back, on every node."""

import asyncio
from dataclasses import asdict

import click

from kvpool.cli.options import cluster_option, json_option, node_option, print_json
from kvpool.units import format_size

GC_TIMEOUT_S = 120.0
"""For one node: rewriting the live part of a disk's segments takes its time."""


@click.command()
@click.option("--dry-run", is_flag=True, help="Only count what would go.")
@node_option
@cluster_option
@json_option
def gc(dry_run: bool, node: str | None, cluster: str | None, as_json: bool) -> None:
    """End leases and blocks that have run out, and give dead room in the tiers back.

    Nodes do this by themselves in time; this does it now, and says how much there was. Exit code 0 when every node answered, 2
    when one did not.
    """
    from kvpool.cli.admin import ask_nodes, choose_nodes, finish, open_members
    from kvpool.cli.screen import new_table, print_answers, short_id

    nodes = choose_nodes(open_members(cluster), node)
    answers = asyncio.run(ask_nodes(nodes, lambda node, rpc: rpc.gc(GC_TIMEOUT_S, dry_run=dry_run)))
    if as_json:
        reports = [{"node": node_id, **asdict(report)} for node_id, report in answers.values.items()]
        print_json({"dry_run": dry_run, "nodes": reports, "errors": answers.errors})
    else:
        columns = ("node", "expired leases", "expired blocks", "orphan blocks", "orphan bytes", "dead bytes", "reclaimed")
        table = new_table("Dry run: nothing was changed" if dry_run else "Collected", columns)
        for node_id, report in answers.values.items():
            counts = (str(report.expired_leases), str(report.expired_blocks), str(report.orphan_blocks))
            sizes = (format_size(report.orphan_bytes), format_size(report.dead_bytes), format_size(report.reclaimed_bytes))
            table.add_row(short_id(node_id), *counts, *sizes)
        print_answers(table, answers.errors)
    finish(answers.errors)
