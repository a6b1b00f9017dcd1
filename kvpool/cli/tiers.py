"""`kvpool tiers`: where each node keeps bytes, and how those places are."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from kvpool.cli.options import cluster_option, json_option, node_option, print_json
from kvpool.units import format_size

if TYPE_CHECKING:
    from kvpool.cli.admin import Answers
    from kvpool.request.admin import TierReport

SHOWN_COUNTERS = 6
"""Counters in a row of the table: the largest of those that tell of harm, then the largest of the others. JSON has all."""
_HARM = ("corrupt", "torn", "error", "fail", "lost", "refused", "full")


@click.command()
@node_option
@cluster_option
@json_option
def tiers(node: str | None, cluster: str | None, as_json: bool) -> None:
    """Show the tiers of each node, fastest first: state, capacity, use, objects, counters.

    Exit code 0 when every tier is ok, 3 when one is read-only or failed, 2 when a node did not answer.
    """
    from kvpool.cli.admin import LOOK_TIMEOUT_S, ask_nodes, choose_nodes, finish, open_members

    nodes = choose_nodes(open_members(cluster), node)
    answers = asyncio.run(ask_nodes(nodes, lambda node, rpc: rpc.tiers(LOOK_TIMEOUT_S)))
    if as_json:
        reports = [{"node": node_id, "tiers": [_as_json(tier) for tier in found]} for node_id, found in answers.values.items()]
        print_json({"nodes": reports, "errors": answers.errors})
    else:
        _show(answers)
    finish(answers.errors, wrong=any(tier.state != "ok" for found in answers.values.values() for tier in found))


def _as_json(tier: "TierReport") -> dict[str, object]:
    names = ("name", "state", "reason", "capacity_bytes", "used_bytes", "objects", "max_objects")
    return {**{name: getattr(tier, name) for name in names}, "counters": dict(tier.counters)}


def _show(answers: "Answers[list[TierReport]]") -> None:
    from kvpool.cli.screen import new_table, plain, print_answers, short_id

    table = new_table("Tiers", ("node", "tier", "state", "fill", "used", "capacity", "objects", "counters", "reason"))
    colours = {"ok": "green", "read-only": "yellow"}
    for node_id, found in answers.values.items():
        for tier in found:
            state = f"[{colours.get(tier.state, 'red')}]{plain(tier.state)}[/]"
            fill = f"{100 * tier.used_bytes / max(1, tier.capacity_bytes):.1f} %"
            objects = f"{tier.objects} of {tier.max_objects}" if tier.max_objects else str(tier.objects)
            counters = plain(", ".join(f"{name} {count}" for name, count in interesting(tier.counters)))
            sizes = (format_size(tier.used_bytes), format_size(tier.capacity_bytes))
            table.add_row(short_id(node_id), plain(tier.name), state, fill, *sizes, objects, counters or "-", plain(tier.reason) or "-")
    print_answers(table, answers.errors)


def interesting(counters: Mapping[str, int]) -> list[tuple[str, int]]:
    """At most `SHOWN_COUNTERS` (name, count) that aren't zero: what tells of harm first, then the largest."""
    counted = [(name, count) for name, count in counters.items() if count]
    return sorted(counted, key=lambda item: (not any(word in item[0] for word in _HARM), -item[1], item[0]))[:SHOWN_COUNTERS]
