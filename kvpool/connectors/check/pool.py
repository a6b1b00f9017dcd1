"""The pool as it is seen from here: who is there, by which reach, with how much room."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.client.choose import AUTO, open_reach
from kvpool.client.sources import open_source
from kvpool.connectors.check.lines import Line, fail, ok, warn
from kvpool.errors import KvpoolError
from kvpool.request.pool import NodeDescription
from kvpool.units import format_size
from kvpool.wire.credentials import Security
from kvpool.wire.pool_client import PoolRpc

RESP = "resp://"
"""Begins an address at which a node serves clients of Redis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen:
    """One node: its books (none of one that was asked as Redis) and the reach to its bytes, or why there is none."""

    address: str
    description: NodeDescription | None = None
    reach: str = ""
    error: str = ""


async def look(source: str, transport: str, security: Security, timeout_s: float) -> list[NodeSeen]:
    """All nodes of the pool at `source`, also those of its addresses at which nobody answers.

    Raises `ConfigError` and `RemoteError` where not even the list of them can be had.
    """
    async with asyncio.timeout(timeout_s + 5):
        if source.startswith(RESP):
            return [await _ping(source.removeprefix(RESP), timeout_s)]
        nodes = await open_source(source, timeout_s, security)
        try:
            known = [node.address for node in nodes.nodes()] if "://" in source else [part.strip() for part in source.split(",")]
            return list(await asyncio.gather(*(_one(address, transport, security, timeout_s) for address in known if address)))
        finally:
            await nodes.close()


async def _ping(address: str, timeout_s: float) -> NodeSeen:
    """A door for clients of Redis. It may want a password: then, too, somebody is there."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"PING\r\n")
            said = await reader.readline()
            writer.close()
    except (OSError, ValueError, TimeoutError) as error:
        return NodeSeen(address=address, error=str(error) or "no answer in time")
    known = said.startswith((b"+PONG", b"-NOAUTH"))
    return NodeSeen(
        address=address, reach="resp" if known else "", error="" if known else f"answers {said[:40]!r}, as no server of Redis does"
    )


async def _one(address: str, transport: str, security: Security, timeout_s: float) -> NodeSeen:
    rpc = PoolRpc(address, security=security)
    try:
        description = await rpc.describe(timeout_s)
        reach = await asyncio.to_thread(open_reach, description, address, transport, security=security)
    except KvpoolError as error:
        return NodeSeen(address=address, error=str(error))
    finally:
        await rpc.close()
    name = reach.name
    await asyncio.to_thread(reach.close)
    return NodeSeen(address=address, description=description, reach=name)


def pool_lines(source: str, transport: str, nodes: Sequence[NodeSeen] | None, trouble: str) -> list[Line]:
    """What the look came to. `nodes` is None where there was `trouble` before any was known."""
    start = "start one with `python -m kvpool.node --listen HOST:PORT`, or name another pool"
    if nodes is None or not nodes:
        return [fail("pool", trouble or f"no node answers at {source}", start)]
    lines = []
    for node in nodes:
        if node.reach == "resp":
            lines.append(ok("pool", f"{node.address}: answers as Redis does"))
            continue
        if node.description is None:
            todo = start if transport == AUTO else f'{start}, or take another "transport" than {transport}'
            lines.append(fail("pool", f"{node.address}: {node.error}", todo))
            continue
        room = f"{format_size(node.description.free_bytes)} of {format_size(node.description.capacity_bytes)} free"
        found = f"{node.address}: reached by {node.reach}, {room}, {node.description.blocks} blocks"
        if node.reach == "grpc":
            lines.append(warn("pool", found, "the slowest reach: let the node offer tcp or ucx to this host"))
        else:
            lines.append(ok("pool", found))
    return lines


def smallest(nodes: Sequence[NodeSeen] | None) -> int:
    """Bytes of the smallest node, 0 if there is none."""
    return min((node.description.capacity_bytes for node in nodes or () if node.description is not None), default=0)


def total(nodes: Sequence[NodeSeen] | None) -> int:
    """Bytes of all nodes."""
    return sum(node.description.capacity_bytes for node in nodes or () if node.description is not None)
