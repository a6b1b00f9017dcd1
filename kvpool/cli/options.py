"""What several commands share: the flags that choose a cluster and a form of output, and printing JSON."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def cluster_option(function: F) -> F:
    """`--cluster URL`, by default the local cluster that is running."""
    return click.option("--cluster", metavar="URL", default=None, help="Cluster URL; by default the one `kvpool up` runs here.")(function)


def json_option(function: F) -> F:
    """`--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")(function)


def print_json(value: Any) -> None:
    """`value` as indented JSON on standard output."""
    click.echo(json.dumps(value, indent=2, sort_keys=True))
