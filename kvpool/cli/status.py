"""`kvpool status`: everybody in the cluster and how they are."""

import asyncio

import click

from kvpool.cli.options import cluster_option, json_option, print_json
from kvpool.cli.state import find_cluster


@click.command()
@cluster_option
@json_option
def status(cluster: str | None, as_json: bool) -> None:
    """Show nodes, workers and routers of a cluster.

    Exit code 0 when every member answered, 2 when one did not.
    """
    from kvpool.cli.screen import console, nodes_table, routers_table, workers_table
    from kvpool.cli.snapshot import node_json, open_cluster, router_json, take_snapshot, worker_json

    with open_cluster(find_cluster(cluster)) as membership:
        snapshot = asyncio.run(take_snapshot(membership.members(), quarantined=membership.quarantined()))
    if as_json:
        nodes, workers = [node_json(report) for report in snapshot.nodes], [worker_json(report) for report in snapshot.workers]
        print_json({"nodes": nodes, "workers": workers, "routers": [router_json(report) for report in snapshot.routers]})
    else:
        out = console()
        for table in (routers_table(snapshot.routers), workers_table(snapshot.workers), nodes_table(snapshot.nodes)):
            out.print(table)
    if not snapshot.complete:
        raise SystemExit(2)
