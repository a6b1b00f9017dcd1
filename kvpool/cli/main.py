"""`kvpool`: the table of commands, each loaded when it is used, so that `kvpool --help` is quick and needs no torch."""

import importlib
from typing import Any

import click

from kvpool.errors import KvpoolError
from kvpool.wire.flags import credential_options

COMMANDS = {
    "up": ("kvpool.cli.up", "Run a whole cluster on this machine."),
    "status": ("kvpool.cli.status", "Show nodes, workers and routers of a cluster."),
    "nodes": ("kvpool.cli.nodes", "Show the pool nodes, their states and their memory."),
    "lookup": ("kvpool.cli.lookup", "Show how much of a text the pool holds, and where."),
    "inspect": ("kvpool.cli.inspect", "Show where copies of blocks are, how they are, and who holds them."),
    "evict": ("kvpool.cli.evict", "Remove blocks from every tier."),
    "pin": ("kvpool.cli.pin", "Keep blocks for a while."),
    "unpin": ("kvpool.cli.pin", "Stop keeping blocks."),
    "quota": ("kvpool.cli.quota", "Show or bound how much each tenant may hold."),
    "rate": ("kvpool.cli.rate", "Bound how much each tenant may ask per second."),
    "token": ("kvpool.cli.token", "Make, list and revoke tokens and API keys."),
    "config": ("kvpool.cli.config", "Show or change what the whole cluster agrees on."),
    "tiers": ("kvpool.cli.tiers", "Show the tiers of each node: state, capacity, use."),
    "events": ("kvpool.cli.events", "Show what nodes come to hold and let go, as it happens."),
    "verify": ("kvpool.cli.verify", "Read every block and check its checksum."),
    "drain": ("kvpool.cli.drain", "Move all blocks of a node to others, so that it can be stopped."),
    "gc": ("kvpool.cli.gc", "End what has run out and give dead room back."),
    "explain": ("kvpool.cli.explain", "Show why a request went where it went, and what became of it."),
    "record": ("kvpool.cli.record", "Record what a router serves, without text, to be replayed."),
    "replay": ("kvpool.cli.replay", "Send a trace to a router, or run it through a simulated cluster."),
    "bench": ("kvpool.cli.bench.command", "Measure the pool on these machines beside what they can do."),
    "connect-check": ("kvpool.cli.connect_check", "Tell whether an engine will use the pool, before it is started."),
    "demo": ("kvpool.cli.demo", "Run a real conversation through a cluster and prove its answers."),
}
"""Name -> (module, summary). Each module has a click command of that name, `-` written `_`."""


class LazyGroup(click.Group):
    """A group whose commands are imported on first use, and whose kvpool errors end in one line and exit code 1."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module."""
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table, importing none."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a kvpool error is for the user to read, not a traceback."""
        try:
            return super().invoke(ctx)
        except KvpoolError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvpool")
@credential_options
@click.pass_context
def cli(context: click.Context, /, **flags: Any) -> None:
    """A disaggregated KV cache service for LLM inference."""
    context.obj = flags
    if any(flags.values()):
        from kvpool.cli.credentials import security

        security()  # what makes no sense is told before anything is done


def main() -> None:
    """Entry point of the `kvpool` script."""
    cli(prog_name="kvpool")
