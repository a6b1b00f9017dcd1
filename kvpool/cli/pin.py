"""`kvpool pin` and `kvpool unpin`: keep blocks for a while, and stop keeping them."""

import asyncio
from typing import TYPE_CHECKING

import click

from kvpool.cli.options import cluster_option, json_option, keys_options, node_option, print_json
from kvpool.errors import ConfigError
from kvpool.units import MS, format_age, parse_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool.wire.admin_client import AdminRpc

_owner_option = click.option("--owner", default="operator", show_default=True, help="In whose name; only the same name unpins.")


@click.command()
@keys_options
@click.option("--for", "duration", default="30m", show_default=True, metavar="DURATION", help="How long, for example 90s, 30m or 2h.")
@click.option("--hard", is_flag=True, help="Never evict before the pin ends; by default only after everything unpinned.")
@_owner_option
@node_option
@cluster_option
@json_option
def pin(
    keys: tuple[str, ...],
    text: str | None,
    model: str | None,
    chat: bool,
    duration: str,
    hard: bool,
    owner: str,
    node: str | None,
    cluster: str | None,
    as_json: bool,
) -> None:
    """Keep the blocks KEY..., or all blocks of a text, wherever they are now, until the time is over.

    Exit code 0 when every block is pinned somewhere, 3 when one is absent or a copy was refused, 2 when a node did not answer.
    """
    from kvpool.cli.admin import CHANGE_TIMEOUT_S, ask_about_keys, choose_keys, choose_nodes, finish, open_members
    from kvpool.cli.outcomes import collect
    from kvpool.cli.screen import plain
    from kvpool.request.admin import MAX_ADMIN_KEYS, PinOutcome

    duration_ms = _duration_ms(duration)
    members = open_members(cluster)
    nodes = choose_nodes(members, node)
    chosen = choose_keys(members, keys, text, model, chat=chat)
    answers = asyncio.run(
        ask_about_keys(
            nodes,
            chosen.keys,
            MAX_ADMIN_KEYS,
            lambda rpc, some: rpc.pin(some, CHANGE_TIMEOUT_S, owner=owner, duration_ms=duration_ms, hard=hard),
        )
    )
    outcomes = collect(chosen, chosen.keys, answers, PinOutcome)
    if as_json:
        print_json({"owner": owner, "hard": hard, "duration_ms": duration_ms, **outcomes.as_json()})
    else:
        totals = outcomes.totals
        kind = "hard" if hard else "soft"
        outcomes.show(
            f"Pins of {plain(owner)}",
            f"{totals['pinned']} copies pinned ({kind}) for {duration}, {totals['refused']} refused; "
            f"{outcomes.absent} of {len(chosen.keys)} blocks are absent",
        )
    finish(outcomes.errors, wrong=outcomes.totals["refused"] > 0 or (outcomes.absent > 0 and not outcomes.errors))


@click.command()
@keys_options
@_owner_option
@node_option
@cluster_option
@json_option
def unpin(
    keys: tuple[str, ...],
    text: str | None,
    model: str | None,
    chat: bool,
    owner: str,
    node: str | None,
    cluster: str | None,
    as_json: bool,
) -> None:
    """End the pins of one owner on the blocks KEY..., or on all blocks of a text.

    Exit code 0 when every node answered, 2 when one did not.
    """
    from kvpool.cli.admin import CHANGE_TIMEOUT_S, ask_about_keys, choose_keys, choose_nodes, finish, open_members
    from kvpool.cli.screen import new_table, plain, print_answers, short_id
    from kvpool.request.admin import MAX_ADMIN_KEYS

    members = open_members(cluster)
    nodes = choose_nodes(members, node)
    chosen = choose_keys(members, keys, text, model, chat=chat)

    async def ask(rpc: "AdminRpc", some: "Sequence[bytes]") -> list[int]:
        return [await rpc.unpin(some, CHANGE_TIMEOUT_S, owner=owner)]

    answers = asyncio.run(ask_about_keys(nodes, chosen.keys, MAX_ADMIN_KEYS, ask))
    ended = {node_id: sum(counts) for node_id, counts in answers.values.items()}
    if as_json:
        print_json({"model": chosen.model, "owner": owner, "unpinned": ended, "errors": answers.errors})
    else:
        table = new_table("Ended pins", ("node", "pins"))
        for node_id, count in ended.items():
            table.add_row(short_id(node_id), str(count))
        print_answers(table, answers.errors, summary=f"{sum(ended.values())} pins of {plain(owner)} ended")
    finish(answers.errors)


def _duration_ms(text: str) -> int:
    """A pin's length from the command line. Raises `ConfigError`."""
    from kvpool.request.admin import MAX_PIN_MS

    duration_ms = parse_duration(text) // MS
    if not 1 <= duration_ms <= MAX_PIN_MS:
        raise ConfigError(f"a pin lasts between 1 ms and {format_age(MAX_PIN_MS * MS)}, not {text}; pin again to hold on for longer")
    return duration_ms
