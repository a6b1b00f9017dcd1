"""`kvpool events`: what pool nodes come to hold and let go, as it happens."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import click

from kvpool.cli.options import cluster_option, json_option, node_option
from kvpool.cli.state import find_cluster

if TYPE_CHECKING:
    from kvpool.client.feed import NodeFeed
    from kvpool.cluster import Member, Membership
    from kvpool.request.events import EventBatch

Line = dict[str, Any]


@click.command()
@node_option
@click.option("--from-start", is_flag=True, help="Print the blocks that are held now first.")
@click.option("--count", type=click.IntRange(1), default=None, help="End after so many blocks.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=None, help="End after so many seconds.")
@cluster_option
@json_option
def events(node: str | None, from_start: bool, count: int | None, seconds: float | None, cluster: str | None, as_json: bool) -> None:
    """Show blocks as nodes store, move and remove them, until Ctrl-C; with --json one object a line.

    A node that can't be reached is tried again. Changes that a node no longer remembers are not shown: a line says that a snapshot was
    taken instead. Exit code 2 when a node did not answer at the end.
    """
    from kvpool.cli.admin import choose_nodes
    from kvpool.cli.snapshot import open_cluster

    with open_cluster(find_cluster(cluster)) as membership:
        tail = Tail(membership, _print_json if as_json else _print_text, from_start=from_start, left=count)
        nodes = choose_nodes(membership.members(), node)
        with suppress(KeyboardInterrupt):
            asyncio.run(tail.run(nodes, seconds))
    if tail.failing:
        raise SystemExit(2)


class Tail:
    """Follows nodes and prints a line for each block, `left` of them at most. `failing`: why nodes (by id) don't answer now."""

    def __init__(self, membership: "Membership", show: Callable[[Line], None], *, from_start: bool, left: int | None) -> None:
        self.failing: dict[str, str] = {}
        self._membership = membership
        self._show = show
        self._from_start = from_start
        self._left = left
        self._enough = asyncio.Event()

    async def run(self, nodes: "Sequence[Member]", seconds: float | None) -> None:
        """Until enough was printed, or for so many seconds. Raises what a node's `follow` raises."""
        following = [asyncio.create_task(self._follow(node)) for node in nodes]
        enough = asyncio.create_task(self._enough.wait())
        try:
            done, _ = await asyncio.wait([enough, *following], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (enough, *following):
                task.cancel()
            await asyncio.gather(enough, *following, return_exceptions=True)

    async def _follow(self, node: "Member") -> None:
        from kvpool.cli.credentials import security
        from kvpool.client.feed import NodeFeed, follow
        from kvpool.wire.events_client import EventsRpc

        feed, met, credentials = NodeFeed(), False, security()

        def connect() -> EventsRpc:
            now = {member.id: member.address for member in self._membership.members("node")}
            return EventsRpc(now.get(node.id, node.address), security=credentials)

        def on_error(error: Exception) -> None:
            if self.failing.get(node.id) != str(error):
                click.echo(f"{node.id[:8]}: {error}; trying again", err=True)
            self.failing[node.id] = str(error)

        async with aclosing(follow(feed, connect, on_error=on_error)) as batches:
            async for batch in batches:
                self.failing.pop(node.id, None)
                for line in _lines(node.id, batch, feed, held=self._from_start and not met):
                    self._say(line)
                met = met or feed.complete

    def _say(self, line: Line) -> None:
        if self._enough.is_set():
            return
        self._show(line)
        if self._left is not None and "key" in line:
            self._left -= 1
            if not self._left:
                self._enough.set()


def _lines(node: str, batch: "EventBatch", feed: "NodeFeed", *, held: bool) -> Iterator[Line]:
    """What there is to say of a batch that `feed` took in. Of a snapshot only that it was taken, unless the blocks `held` are wanted."""
    from kvpool.request.events import TIER_NAMES

    at = {"node": node, "incarnation": batch.incarnation, "sequence": batch.sequence}
    if held or (feed.complete and not batch.part):
        event = "held" if batch.part else "stored"
        for key, parent, depth, tier in batch.stored:
            yield {**at, "event": event, "key": key.hex(), "parent": parent and parent.hex(), "depth": depth, "tier": TIER_NAMES[tier]}
        for key in batch.removed:
            yield {**at, "event": "removed", "key": key.hex()}
    if batch.last:
        yield {**at, "event": "snapshot", "blocks": len(feed)}


def _print_json(line: Line) -> None:
    click.echo(json.dumps(line, sort_keys=True))


def _print_text(line: Line) -> None:
    words = [line["node"][:8], str(line["sequence"]).rjust(8), line["event"].ljust(8)]
    if line["event"] == "snapshot":
        words.append(f"of {line['blocks']} blocks; changes follow")
    else:
        words += [line["key"][:16], line.get("tier", "").ljust(5), f"at {line['depth']}" if "depth" in line else ""]
    click.echo("  ".join(words).rstrip())
