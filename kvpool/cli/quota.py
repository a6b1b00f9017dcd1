"""`kvpool quota`: how much each tenant holds on each node, and how much it may."""

import asyncio
from typing import TYPE_CHECKING

import click

from kvpool.cli.options import cluster_option, json_option, node_option, print_json
from kvpool.errors import ConfigError
from kvpool.units import format_size, parse_size

if TYPE_CHECKING:
    from kvpool.cli.admin import Answers
    from kvpool.cluster import Member
    from kvpool.request.admin import Quota
    from kvpool.wire.admin_client import AdminRpc


@click.command()
@click.argument("tenant", required=False)
@click.option("--set", "size", default=None, metavar="SIZE", help="Bytes TENANT may hold on each node, for example 10GiB.")
@click.option("--remove", is_flag=True, help="Let TENANT hold as much as there is room for.")
@node_option
@cluster_option
@json_option
def quota(tenant: str | None, size: str | None, remove: bool, node: str | None, cluster: str | None, as_json: bool) -> None:
    """List tenants, or one TENANT, with what they hold and may hold; or set or remove its quota.

    A quota is of one node: over a cluster a tenant may hold it once per node. The tenant '' is whatever was written without one.
    Exit code 0 when every node answered, 2 when one did not.
    """
    from kvpool.cli.admin import CHANGE_TIMEOUT_S, LOOK_TIMEOUT_S, ask_nodes, choose_nodes, finish, open_members

    max_bytes = _max_bytes(tenant, size, remove)
    nodes = choose_nodes(open_members(cluster), node)

    async def ask(node: "Member", rpc: "AdminRpc") -> "list[Quota]":
        if max_bytes is not None and tenant is not None:
            await rpc.set_quota(tenant, max_bytes, CHANGE_TIMEOUT_S)
        return [found for found in await rpc.quotas(LOOK_TIMEOUT_S) if tenant in (None, found.tenant)]

    answers = asyncio.run(ask_nodes(nodes, ask))
    if as_json:
        quotas = [
            {"node": node_id, "tenant": found.tenant, "used_bytes": found.used_bytes, "max_bytes": found.max_bytes}
            for node_id, some in answers.values.items()
            for found in some
        ]
        print_json({"quotas": quotas, "errors": answers.errors})
    else:
        _show(answers)
    finish(answers.errors)


def _max_bytes(tenant: str | None, size: str | None, remove: bool) -> int | None:
    """What to set: bytes, 0 to remove, None to look only. Raises `ConfigError`."""
    if size is not None and remove:
        raise ConfigError("--set gives a quota and --remove takes it away; use one of them")
    if (size is not None or remove) and tenant is None:
        raise ConfigError("say whose quota: kvpool quota TENANT --set SIZE")
    if size is None:
        return 0 if remove else None
    max_bytes = parse_size(size)
    if max_bytes < 1:
        raise ConfigError("a quota must be above 0; to let a tenant hold as much as there is room for, use --remove")
    return max_bytes


def _show(answers: "Answers[list[Quota]]") -> None:
    from kvpool.cli.screen import new_table, plain, print_answers, short_id

    table = new_table("Quotas, per node", ("tenant", "node", "used", "of", "fill"))
    rows = sorted(((found.tenant, node_id, found) for node_id, some in answers.values.items() for found in some), key=lambda row: row[:2])
    for tenant, node_id, found in rows:
        limit = "no quota" if found.max_bytes is None else format_size(found.max_bytes)
        fill = "-" if found.max_bytes is None else f"{100 * found.used_bytes / max(1, found.max_bytes):.1f} %"
        table.add_row(plain(tenant) or "''", short_id(node_id), format_size(found.used_bytes), limit, fill)
    print_answers(table, answers.errors)
