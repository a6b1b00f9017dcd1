"""`kvpool bench`: measure the pool on these machines."""

from typing import TYPE_CHECKING, Any

import click

from kvpool.cli.options import cluster_option, print_json
from kvpool.errors import ConfigError
from kvpool.units import format_size, parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpool.cli.bench.plan import Shape
    from kvpool.cli.bench.runner import Outcome

REACHES = ("shm", "tcp", "ucx", "grpc")


@click.group()
def bench() -> None:
    """Measure the pool on these machines, beside what they can do at all."""


@bench.command()
@cluster_option
@click.option("--local", is_flag=True, help="Start a node for the occasion instead; its CPU time is measured, too.")
@click.option("--sizes", default="64KiB,1MiB", show_default=True, help="Bytes of a block.")
@click.option("--batch", "batches", default="1,32", show_default=True, help="Blocks in a call.")
@click.option("--reach", "reaches", default=",".join(REACHES), show_default=True, help="Ways to the bytes.")
@click.option("--seconds", default=1.0, show_default=True, type=click.FloatRange(0.05, 3600), help="Time for each case.")
@click.option("-o", "--output", default="table", show_default=True, type=click.Choice(["table", "json"]))
@click.option("--json", "output", flag_value="json", help="The same as -o json.")
def pool(cluster: str | None, local: bool, sizes: str, batches: str, reaches: str, seconds: float, output: str) -> None:
    """Measure gets and puts from this machine: latency, rate, CPU time, beside memcpy and plain TCP sockets of the same buffers.

    Blocks are written under a namespace made for the run, with a time to live, and removed when it is over. The run takes at most the room
    that it names; a pool that is full gives up as much of what it values least, and nothing beyond that. Removing blocks is an
    operator's right. Ways that don't lead anywhere from here are named below the table. Exit code 1 when none does.
    """
    from kvpool.cli.bench.plan import Shape
    from kvpool.cli.bench.runner import run_local, run_on_cluster

    shapes = [Shape(size, batch) for size in _numbers(sizes, parse_size) for batch in _numbers(batches, _count)]
    names = [name.strip() for name in reaches.split(",") if name.strip()]
    if not names or not set(names) <= set(REACHES):
        raise ConfigError(f"--reach takes some of {','.join(REACHES)}, got {reaches!r}")
    if local and cluster is not None:
        raise ConfigError("give either --cluster URL or --local")
    outcome = run_local(shapes, names, seconds) if local else run_on_cluster(cluster, shapes, names, seconds)
    if output == "json":
        print_json(outcome.as_json())
    else:
        _show(outcome, shapes)


def _numbers(text: str, parse: Any) -> "Sequence[int]":
    """The comma-separated values of an option, smallest first. Raises `ConfigError`."""
    found = sorted({parse(part) for part in text.split(",") if part.strip()})
    if not found or found[0] < 1:
        raise ConfigError(f"not a list of numbers above 0: {text!r}")
    return found


def _count(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"not a number of blocks: {text!r}") from None


def _show(outcome: "Outcome", shapes: "Sequence[Shape]") -> None:
    from kvpool.cli.screen import console, new_table, plain

    out = console()
    for shape in shapes:
        columns = ("way", "op", "p50 us", "p90 us", "p99 us", "GB/s", "of memcpy", "of raw tcp", "CPU s/GiB here", "at the server")
        table = new_table(f"{shape.batch} x {format_size(shape.size)}", columns)
        for row in outcome.rows(shape):
            times = (f"{row[f'p{share}_us']:.1f}" for share in (50, 90, 99))
            ratios = (f"{row[key]:.2f}" for key in ("over_memcpy", "over_raw_tcp"))
            server = row["server_cpu_s_per_gib"]
            cpu = (f"{row['client_cpu_s_per_gib']:.3f}", "-" if server is None else f"{server:.3f}")
            table.add_row(row["way"], row["op"], *times, f"{row['gbps']:.2f}", *ratios, *cpu)
        out.print(table)
    for way, why in outcome.unreachable.items():
        out.print(f"{way}: {plain(why)}", highlight=False)
    room = f"at most {format_size(outcome.room_bytes)} of the pool for each copy of a block"
    out.print(f"the run took {room} and has removed what it wrote", highlight=False)
