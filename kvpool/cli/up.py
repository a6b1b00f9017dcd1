"""`kvpool up`: the whole cluster on this machine, in the foreground, until Ctrl-C."""

import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from kvpool.cli.procs import DTYPES, MAX_PROCESSES_PER_ROLE, TRANSPORTS, ClusterOptions
from kvpool.cli.ray_flags import make_cluster, ray_options, take_ray_flags
from kvpool.cluster.config import MAX_COPIES
from kvpool.errors import ConfigError, DeadlineError, UnavailableError
from kvpool.units import SECOND, parse_size

if TYPE_CHECKING:
    from kvpool.cli.supervisor import LocalCluster

MODEL_TIMEOUT_S = 600.0
_STEP_S = 0.2
_COUNT = click.IntRange(0, MAX_PROCESSES_PER_ROLE)


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="smollm2, a model directory or a .gguf file.")
@click.option("--nodes", default=1, show_default=True, type=_COUNT, help="Pool nodes.")
@click.option("--copies", default=1, show_default=True, type=click.IntRange(1, MAX_COPIES), help="Nodes that hold each block.")
@click.option("--prefill", default=1, show_default=True, type=_COUNT, help="Prefill workers.")
@click.option("--decode", default=1, show_default=True, type=click.IntRange(1, MAX_PROCESSES_PER_ROLE), help="Decode workers.")
@click.option("--capacity", default="1GiB", show_default=True, help="Memory of each pool node.")
@click.option("--ssd", default=None, type=click.Path(file_okay=False, path_type=Path), help="Directory for an SSD tier of each node.")
@click.option("--ssd-capacity", default="16GiB", show_default=True, help="Bytes of each node's SSD tier.")
@click.option("--policy", default="", help="Eviction policy of the nodes, by name.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="Port of the router; 0 takes a free one.")
@click.option("--transport", default="auto", show_default=True, type=click.Choice(TRANSPORTS), help="How workers reach the pool's bytes.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(DTYPES), help="Of the model and its KV cache.")
@click.option("--block-tokens", default=16, show_default=True, type=click.IntRange(1, 512), help="Tokens of a block.")
@click.option("--chunk-tokens", default=256, show_default=True, type=click.IntRange(1), help="Tokens a prefill step computes.")
@click.option("--resident", default="512MiB", show_default=True, help="KV of finished requests that each worker keeps; 0: none.")
@click.option("--log-dir", default=None, type=click.Path(file_okay=False, path_type=Path), help="Where each process writes its log.")
@click.option("--no-restart", is_flag=True, help="Leave a process that dies dead.")
@ray_options
def up(capacity: str, ssd_capacity: str, resident: str, log_dir: Path | None, no_restart: bool, **options: Any) -> None:
    """Run a whole cluster on this machine until Ctrl-C: membership, pool nodes, workers and router.

    A process that dies is started again. Ctrl-C stops everything in order; a second one stops it at once. With --ray the processes
    are placed by Ray.
    """
    from kvpool.cli.logs import log_root, new_run
    from kvpool.cli.state import read_state, state_path

    placed = take_ray_flags(options)
    chosen = ClusterOptions(
        capacity_bytes=parse_size(capacity),
        ssd_capacity_bytes=parse_size(ssd_capacity),
        resident_bytes=parse_size(resident),
        restart=not no_restart,
        **options,
    )
    running = read_state(state_path())
    if running is not None:
        where = running.router_url or "a host that Ray chose"
        raise ConfigError(f"a cluster is running already at {where} (pid {running.pid}); stop it first: kill {running.pid}")
    log_dir = log_dir or new_run(log_root())
    screen: PlainScreen
    cluster = make_cluster(chosen, placed, log_dir=log_dir, state_file=state_path(), on_event=lambda line: screen.say(line))
    _prepare_model(chosen.model)
    screen = _screen()
    stop = _stop_on_signals(cluster)
    screen.say(f"starting; logs are in {log_dir}")
    try:
        cluster.start()
        _watch(cluster, screen, stop)
    finally:
        screen.close()
        click.echo("stopping")
        cluster.stop()
    click.echo("stopped")


def _prepare_model(model: str) -> None:
    """Find the model, converting it once if need be, before any process would fail over it."""
    from kvpool.config.models import resolve_model

    resolve_model(model, deadline_ns=time.monotonic_ns() + int(MODEL_TIMEOUT_S * SECOND))


def _stop_on_signals(cluster: "LocalCluster") -> threading.Event:
    """An event that SIGINT and SIGTERM set; a second signal cuts the grace of the shutdown."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            cluster.hurry()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return stop


def _watch(cluster: "LocalCluster", screen: "PlainScreen", stop: threading.Event) -> None:
    """Until asked to stop: announce readiness, and keep the screen up to date."""
    from kvpool.cli.supervisor import READY_TIMEOUT_S

    deadline, ready = time.monotonic() + READY_TIMEOUT_S, False
    while not stop.wait(_STEP_S):
        if not ready and cluster.ready():
            ready = True
            screen.say(f"ready: {cluster.url} (OpenAI API at {cluster.url}/v1, model {cluster.options.served_model_name})")
            screen.say(f"cluster: {_without_password(cluster.cluster_url)}")
        if not ready and time.monotonic() > deadline:
            raise DeadlineError(f"the cluster was not ready within {READY_TIMEOUT_S:.0f} s; logs are in {cluster.log_dir}")
        if cluster.over:
            raise UnavailableError(f"every process has ended and none is started again; logs are in {cluster.log_dir}")
        screen.show(cluster)


def _without_password(url: str) -> str:
    """A cluster URL as it is; one that holds a password without what may be secret."""
    from kvpool.cluster.url import parse_cluster_url

    parsed = parse_cluster_url(url)
    secret = "password" in parsed.login or "password" in parsed.sentinel_login
    return f"{parsed.name} at {parsed.where}" if secret else url


class PlainScreen:
    """Output that isn't a terminal: one line per event."""

    def say(self, line: str) -> None:
        """Print a line; any thread."""
        click.echo(line)

    def show(self, cluster: "LocalCluster") -> None:
        """Nothing between events."""

    def close(self) -> None:
        """Nothing to give back."""


def _screen() -> PlainScreen:
    """Tables that follow the cluster on a terminal, plain lines elsewhere."""
    if not sys.stdout.isatty():
        return PlainScreen()
    from kvpool.cli.live import LiveScreen

    return LiveScreen()
