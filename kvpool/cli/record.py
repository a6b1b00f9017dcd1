"""`kvpool record`: a line for each request that a router has served, without text; `kvpool replay` reads it."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import click

from kvpool.cli.options import cluster_option
from kvpool.cli.routers import router_url
from kvpool.errors import ConfigError


@click.command()
@click.option("--router", metavar="URL", default=None, help="The router to follow; by default the only one of the cluster.")
@click.option("--out", default="-", help="File to write, which must not exist yet (- for standard output).")
@click.option("--count", default=None, type=click.IntRange(1), help="Stop after so many requests.")
@click.option("--seconds", default=None, type=click.FloatRange(0, min_open=True), help="Stop after so long.")
@cluster_option
def record(router: str | None, out: str, count: int | None, seconds: float | None, cluster: str | None) -> None:
    """Record what a router serves, until Ctrl-C: lengths, times, and hashes of the prompts' blocks that tell what they share.

    There is no text in it, and its hashes are keyed by a secret that nobody keeps.
    """
    from kvpool.cli.http import stream_lines

    url = router_url(router, cluster)
    requests = 0
    with _opened(out) as file, contextlib.suppress(KeyboardInterrupt):
        for line in stream_lines(f"{url}/kvpool/record", until_s=None if seconds is None else time.monotonic() + seconds):
            if line.strip():
                file.write(line.rstrip("\n") + "\n")
                file.flush()
                requests += "at_ms" in json.loads(line)
            if requests == count:
                break
    click.echo(f"{requests} requests recorded", err=True)


@contextlib.contextmanager
def _opened(out: str) -> Iterator[IO[str]]:
    if out == "-":
        yield sys.stdout
        return
    try:
        with Path(out).open("x") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"can't write {out}: {error}") from error
