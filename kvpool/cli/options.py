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


def node_option(function: F) -> F:
    """`--node ID-prefix`, by default every node."""
    return click.option("--node", metavar="ID", default=None, help="Only this pool node; the start of its id is enough.")(function)


def keys_options(function: F) -> F:
    """Which blocks: `KEY...` (`keys`), or `--prefix TEXT` with `--model` and `--chat`, as `kvpool lookup` takes them."""
    for option in (
        click.option("--chat", is_flag=True, help="Take the text as a user's message and render its conversation."),
        click.option("--model", default=None, help="Served model name; needed only when the cluster serves several."),
        click.option("--prefix", "text", metavar="TEXT", default=None, help="All blocks of this text (- for standard input)."),
        click.argument("keys", metavar="[KEY]...", nargs=-1),
    ):
        function = option(function)
    return function


def print_json(value: Any) -> None:
    """`value` as indented JSON on standard output."""
    click.echo(json.dumps(value, indent=2, sort_keys=True))
