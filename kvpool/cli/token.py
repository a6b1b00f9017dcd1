"""`kvpool token`: make, list and revoke the tokens that servers started with `--tokens` accept."""

import time
from pathlib import Path

import click

from kvpool.cli.options import json_option, print_json

_TABLE = click.option(
    "--tokens",
    "table",
    envvar="KVPOOL_TOKENS",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The table: a file that nodes, workers and routers read again when it changes.",
)


@click.group()
def token() -> None:
    """Tokens for clients, API keys of the router, and those of workers, routers and operators."""


@token.command()
@click.option("--name", required=True, help="Whose it is; what it is revoked by.")
@click.option("--tenant", default=None, help="Bind it to a tenant: its blocks and nobody else's.")
@click.option("--rights", default="read,write", show_default=True, help="Of read, write, map, worker, admin; by commas.")
@_TABLE
def new(name: str, tenant: str | None, rights: str, table: Path) -> None:
    """Make a token and print it, once: only its digest is kept."""
    from kvpool.security.tokens import new_token

    wanted = [right.strip() for right in rights.split(",") if right.strip()]
    _, made = new_token(table, name=name, tenant=tenant, rights=wanted, now_s=int(time.time()))
    click.echo(made)


@token.command("list")
@_TABLE
@json_option
def show(table: Path, as_json: bool) -> None:
    """Show the tokens there are; not what they are."""
    from kvpool.cli.screen import console, new_table, plain
    from kvpool.security.tokens import read_rows

    rows = read_rows(table)
    if as_json:
        print_json([{"id": r.id, "name": r.name, "tenant": r.tenant, "rights": list(r.rights), "created_s": r.created_s} for r in rows])
        return
    out = new_table("Tokens", ("id", "name", "tenant", "rights", "made"))
    for row in rows:
        made = time.strftime("%Y-%m-%d %H:%M", time.gmtime(row.created_s))
        out.add_row(row.id, plain(row.name), plain(row.tenant or "-"), ", ".join(row.rights), made)
    console().print(out)


@token.command()
@click.argument("which")
@_TABLE
def revoke(which: str, table: Path) -> None:
    """Take the token with the id or name WHICH out of the table; servers refuse it at the next call."""
    from kvpool.security import tokens

    row = tokens.revoke(table, which)
    click.echo(f"revoked {row.id} ({row.name})")
