"""`kvpool evict`: remove blocks from every tier of every node."""

import asyncio
from typing import TYPE_CHECKING

import click

from kvpool.cli.options import cluster_option, json_option, keys_options, node_option, print_json

if TYPE_CHECKING:
    from kvpool.cli.outcomes import Outcomes


@click.command()
@keys_options
@click.option("--dry-run", is_flag=True, help="Only say what would become of each block.")
@node_option
@cluster_option
@json_option
def evict(
    keys: tuple[str, ...],
    text: str | None,
    model: str | None,
    chat: bool,
    dry_run: bool,
    node: str | None,
    cluster: str | None,
    as_json: bool,
) -> None:
    """Remove the blocks KEY..., or all blocks of a text, from every tier.

    A block that somebody is reading is unlinked at once (held); its bytes come back when the last lease on it ends. A hard pin
    keeps its block. Exit code 0 when all are gone or were never there, 3 when a pin kept one, 2 when a node did not answer.
    """
    from kvpool.cli.admin import CHANGE_TIMEOUT_S, ask_about_keys, choose_keys, choose_nodes, finish, open_members
    from kvpool.cli.outcomes import collect
    from kvpool.request.admin import MAX_ADMIN_KEYS, EvictOutcome

    members = open_members(cluster)
    nodes = choose_nodes(members, node)
    chosen = choose_keys(members, keys, text, model, chat=chat)
    asked = chosen.keys[::-1]  # tails first: what is left is a usable prefix at any time
    answers = asyncio.run(
        ask_about_keys(nodes, asked, MAX_ADMIN_KEYS, lambda rpc, some: rpc.evict(some, CHANGE_TIMEOUT_S, dry_run=dry_run))
    )
    outcomes = collect(chosen, asked, answers, EvictOutcome)
    if as_json:
        print_json({"dry_run": dry_run, **outcomes.as_json()})
    else:
        _show(outcomes, dry_run=dry_run)
    finish(outcomes.errors, wrong=outcomes.totals["pinned"] > 0)


def _show(outcomes: "Outcomes", *, dry_run: bool) -> None:
    totals = outcomes.totals
    would = "would be " if dry_run else ""
    outcomes.show(
        "Dry run: nothing was changed" if dry_run else "Evictions",
        f"{totals['evicted']} copies {would}evicted, {totals['held']} {would}unlinked but held by leases, "
        f"{totals['pinned']} kept by hard pins; {outcomes.absent} of {len(outcomes.chosen.keys)} blocks are absent",
    )
