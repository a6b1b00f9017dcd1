"""`kvpool nodes`: the pool nodes, their states and their memory."""

import asyncio

import click

from kvpool.cli.options import cluster_option, json_option, print_json
from kvpool.cli.state import find_cluster


@click.command()
@cluster_option
@json_option
def nodes(cluster: str | None, as_json: bool) -> None:
    """Show the pool nodes, their states and their memory.

    Exit code 0 when every node answered, 2 when one did not.
    """
    from kvpool.cli.screen import console, nodes_table
    from kvpool.cli.snapshot import node_json, open_cluster, take_snapshot

    with open_cluster(find_cluster(cluster)) as membership:
        snapshot = asyncio.run(take_snapshot(membership.members("node"), quarantined=membership.quarantined()))
    if as_json:
        print_json([node_json(report) for report in snapshot.nodes])
    else:
        console().print(nodes_table(snapshot.nodes))
    if not snapshot.complete:
        raise SystemExit(2)
