"""`kvpool rate`: how many calls and bytes per second a tenant may."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvpool.cli.options import cluster_option, node_option
from kvpool.errors import ConfigError
from kvpool.units import parse_size

if TYPE_CHECKING:
    from kvpool.cluster import Member


@click.command()
@click.argument("tenant")
@click.option("--requests-per-s", default=0.0, type=click.FloatRange(0), help="Calls; 0: as many as it likes.")
@click.option("--bytes-per-s", default="0", metavar="SIZE", help="Bytes leased for reading or writing; 0: as many as it likes.")
@click.option("--file", default=None, type=click.Path(dir_okay=False, path_type=Path), help="A router's --tenants file, instead of nodes.")
@node_option
@cluster_option
def rate(tenant: str, requests_per_s: float, bytes_per_s: str, file: Path | None, node: str | None, cluster: str | None) -> None:
    """Bound what TENANT may ask of each node, or of each router that reads FILE; it outlives restarts.

    Exit code 0 when every node took it, 2 when one did not.
    """
    size = parse_size(bytes_per_s)
    if file is not None:
        from kvpool.security.tenants import TenantBook

        TenantBook(file).change(tenant, requests_per_s=requests_per_s, bytes_per_s=float(size))
        return
    from kvpool.cli.admin import choose_nodes, finish, open_members

    errors = asyncio.run(_tell(choose_nodes(open_members(cluster), node), tenant, requests_per_s, size))
    for node_id, why in errors.items():
        click.echo(f"{node_id[:8]}: {why}", err=True)
    finish(errors)


async def _tell(nodes: "list[Member]", tenant: str, requests_per_s: float, bytes_per_s: int) -> dict[str, str]:
    """Tell every node; why some didn't take it."""
    from kvpool.cli.admin import CHANGE_TIMEOUT_S
    from kvpool.cli.credentials import security
    from kvpool.errors import KvpoolError
    from kvpool.wire.access_client import AccessRpc

    errors: dict[str, str] = {}
    for node in nodes:
        rpc = AccessRpc(node.address, security=security())
        try:
            await rpc.set_rates(tenant, requests_per_s=requests_per_s, bytes_per_s=float(bytes_per_s), timeout_s=CHANGE_TIMEOUT_S)
        except ConfigError:
            raise
        except KvpoolError as error:
            errors[node.id] = str(error)
        finally:
            await rpc.close()
    return errors
