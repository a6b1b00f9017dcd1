"""The flags about Ray, and the cluster they ask for. Ray itself is imported only when one of them is given."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvpool.cli.procs import MAX_PROCESSES_PER_ROLE, ClusterOptions
from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from kvpool.cli.supervisor import LocalCluster

F = TypeVar("F", bound=Callable[..., Any])
_COUNT = click.IntRange(1, MAX_PROCESSES_PER_ROLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayFlags:
    """`--ray`, `--cluster`, `--min` and `--max`, as given."""

    ray: str | None = None
    cluster: str | None = None
    least: int | None = None
    most: int | None = None


def ray_options(function: F) -> F:
    """The four flags, to be taken out with `take_ray_flags`."""
    for option in (
        click.option("--max", "most", default=None, type=_COUNT, help="With --ray: most workers of each group; they follow the load."),
        click.option("--min", "least", default=None, type=_COUNT, help="With --ray: fewest workers of each group; 1 if --max is given."),
        click.option("--cluster", metavar="URL", default=None, help="With --ray ADDRESS: the Redis server where members meet."),
        click.option(
            "--ray", metavar="ADDRESS|local", default=None, help="Let Ray place the processes: HOST:PORT, auto, or one of our own."
        ),
    ):
        function = option(function)
    return function


def take_ray_flags(options: dict[str, Any]) -> RayFlags:
    """Remove the four flags from a command's options. Raises `ConfigError` when the others are given without `--ray`."""
    flags = RayFlags(**{name: options.pop(name) for name in ("ray", "cluster", "least", "most")})
    if flags.ray is None and flags != RayFlags():
        raise ConfigError("--cluster, --min and --max go with --ray")
    return flags


def make_cluster(options: ClusterOptions, flags: RayFlags, **more: Any) -> "LocalCluster":
    """The cluster, not started: `LocalCluster`, or `RayCluster` with `--ray`; `more` is passed on. Raises `ConfigError`."""
    if flags.ray is None:
        from kvpool.cli.supervisor import LocalCluster

        return LocalCluster(options, **more)
    from kvpool.cli.ray.cluster import RayCluster
    from kvpool.cli.ray.scaling import Limits

    limits = None
    if flags.least is not None or flags.most is not None:
        limits = Limits(least=flags.least or 1, most=flags.most or max(options.prefill, options.decode, flags.least or 1))
    return RayCluster(options, address=flags.ray, membership_url=flags.cluster, limits=limits, **more)
