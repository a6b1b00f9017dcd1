"""`kvpool config`: what the whole cluster agrees on, and changing it."""

from typing import TYPE_CHECKING, Any

import click

from kvpool.cli.options import cluster_option, json_option, print_json

if TYPE_CHECKING:
    from kvpool.cluster import ClusterConfig


@click.group()
def config() -> None:
    """Show or change what the whole cluster agrees on. Changes reach every member within a poll."""


@config.command()
@click.argument("key", required=False)
@cluster_option
@json_option
def get(key: str | None, cluster: str | None, as_json: bool) -> None:
    """Show all settings, or the value of KEY."""
    from kvpool.cli.screen import console, new_table, plain
    from kvpool.cli.snapshot import open_cluster
    from kvpool.cli.state import find_cluster
    from kvpool.cluster import ClusterConfig

    with open_cluster(find_cluster(cluster)) as membership:
        found = membership.config
    settings = found.settings() if key is None else {key: found.setting(key)}
    if as_json:
        print_json({"version": found.version, "settings": settings})
    elif key is not None:
        click.echo(_shown(key, settings[key]))
    else:
        table = new_table(f"Config, version {found.version}", ("setting", "value", "default"))
        defaults = ClusterConfig()
        for name, value in settings.items():
            table.add_row(plain(name), _shown(name, value), _shown(name, defaults.setting(name)))
        console().print(table)


@config.command(name="set")
@click.argument("key")
@click.argument("value")
@cluster_option
@json_option
def set_(key: str, value: str, cluster: str | None, as_json: bool) -> None:
    """Change KEY to VALUE: `copies 2`, `handover_s 1m`, `rebalance_bytes_per_s 512MiB`, `near_copies false`.

    `namespace_copies.FINGERPRINT` is the number of copies in one namespace; its value `default` takes it back.
    """
    from kvpool.cli.snapshot import open_cluster
    from kvpool.cli.state import find_cluster

    with open_cluster(find_cluster(cluster)) as membership:
        before = membership.config

        def change(known: "ClusterConfig") -> "ClusterConfig":
            nonlocal before
            before = known
            return known.with_setting(key, value)

        after = membership.configure(change)
    if as_json:
        print_json({"version": after.version, "settings": {key: after.setting(key)}})
    else:
        click.echo(f"{key}: {_shown(key, before.setting(key))} -> {_shown(key, after.setting(key))} (version {after.version})")


def _shown(name: str, value: Any) -> str:
    """A value as `set` takes it."""
    from kvpool.units import format_size, parse_size

    if name == "rebalance_bytes_per_s":
        short = format_size(value).replace(".00 ", " ")
        return short if parse_size(short) == value else str(value)
    return f"{value:g}" if isinstance(value, float) else str(value).lower()
