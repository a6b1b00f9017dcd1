"""`kvpool inspect`: where the copies of blocks are, how they are, and who holds them."""

import asyncio
from typing import TYPE_CHECKING, Any

import click

from kvpool.cli.options import cluster_option, json_option, keys_options, node_option, print_json
from kvpool.units import MS, format_age, format_size

if TYPE_CHECKING:
    from kvpool.cli.admin import Answers, Chosen
    from kvpool.request.admin import Inspection


@click.command()
@keys_options
@node_option
@cluster_option
@json_option
def inspect(
    keys: tuple[str, ...], text: str | None, model: str | None, chat: bool, node: str | None, cluster: str | None, as_json: bool
) -> None:
    """Show every copy of the blocks KEY..., or of a text's: tiers, size, codec, age, hits, holders.

    One KEY comes with its story, on nodes that hold it and on nodes that did. Looking takes no lease and keeps nothing warm.
    Exit code 0 when every node answered, 2 when one did not.
    """
    from kvpool.cli.admin import LOOK_TIMEOUT_S, ask_about_keys, choose_keys, choose_nodes, finish, open_members
    from kvpool.request.admin import MAX_INSPECT_KEYS

    members = open_members(cluster)
    nodes = choose_nodes(members, node)
    chosen = choose_keys(members, keys, text, model, chat=chat)
    story = len(chosen.keys) == 1
    answers = asyncio.run(
        ask_about_keys(nodes, chosen.keys, MAX_INSPECT_KEYS, lambda rpc, some: rpc.inspect(some, LOOK_TIMEOUT_S, story=story))
    )
    if as_json:
        print_json(_as_json(chosen, answers))
    else:
        _show(chosen, answers, story=story)
    finish(answers.errors)


def _as_json(chosen: "Chosen", answers: "Answers[list[Inspection]]") -> dict[str, Any]:
    from kvpool.cli.admin import key_json

    blocks = []
    for index in range(len(chosen.keys)):
        about = {node: found[index] for node, found in answers.values.items() if index < len(found)}
        copies = [_copy_json(node, found) for node, found in about.items() if found.tiers]
        stories = {node: list(found.story) for node, found in about.items() if found.story}
        blocks.append({**key_json(chosen, index), "copies": copies, "stories": stories})
    return {"model": chosen.model, "blocks": blocks, "errors": answers.errors}


def _copy_json(node: str, found: "Inspection") -> dict[str, Any]:
    from dataclasses import asdict

    fields = asdict(found)
    del fields["key"], fields["story"]
    return {"node": node, **fields, "parent": found.parent.hex(), "flags": _flags(found)}


def _flags(found: "Inspection") -> list[str]:
    from kvpool.block.header import Flags

    names = [flag.name or "" for flag in Flags if found.flags & flag]
    unknown = found.flags & ~sum(Flags)
    return [*names, *([f"{unknown:#x}"] if unknown else [])]


def _show(chosen: "Chosen", answers: "Answers[list[Inspection]]", *, story: bool) -> None:
    from kvpool.cli.admin import block_name
    from kvpool.cli.screen import console, new_table, plain, print_answers, short_id

    columns = ("block", "node", "tiers", "size", "tokens", "codec", "age", "idle", "hits", "ttl", "priority", "tenant", "leases", "pins")
    table = new_table("Blocks", columns)
    held = 0
    for index in range(len(chosen.keys)):
        copies = [(node, found[index]) for node, found in answers.values.items() if index < len(found) and found[index].tiers]
        held += bool(copies)
        for node, found in copies:
            table.add_row(block_name(chosen, index), short_id(node), *_cells(found))
        if not copies:
            table.add_row(block_name(chosen, index), "-", "absent")
    print_answers(table, answers.errors, summary=f"{held} of {len(chosen.keys)} blocks are in the pool")
    out = console()
    for node, only in answers.values.items() if story else ():
        lines = only[0].story
        out.print(f"Story on {short_id(node)}:" if lines else f"{short_id(node)} remembers nothing of it", highlight=False)
        for line in lines:
            out.print(f"  {plain(line)}", highlight=False)


def _cells(found: "Inspection") -> tuple[str, ...]:
    from kvpool.cli.screen import plain

    tiers = ", ".join(plain(f"{tier.name} {tier.state}") for tier in found.tiers)
    leases = [plain(f"{lease.kind} {lease.owner} {format_age(lease.left_ms * MS)}") for lease in found.leases]
    pins = [plain(f"{'hard' if pin.hard else 'soft'} {pin.owner} {format_age(pin.left_ms * MS)}") for pin in found.pins]
    ttl = "-" if found.ttl_left_ms is None else format_age(found.ttl_left_ms * MS)
    return (
        tiers,
        format_size(found.size),
        f"{found.depth}-{found.depth + found.n_tokens}",
        plain(" ".join([found.codec or "plain", *(flag for flag in _flags(found) if flag != "PURE")])),
        format_age(found.age_ms * MS),
        format_age(found.idle_ms * MS),
        str(found.hits),
        ttl,
        str(found.priority),
        plain(found.tenant) or "-",
        _holders(leases, found.lease_count),
        _holders(pins, found.pin_count),
    )


def _holders(listed: list[str], count: int) -> str:
    more = [f"and {count - len(listed)} more"] if count > len(listed) else []
    return "\n".join([*listed, *more]) or "-"
