"""A process that owns an arena and moves its bytes over gRPC to anybody who asks: the far side of the reach kit.

`python grpc_owner.py DIRECTORY BYTES` prints the arena's path and the address, then serves until it is killed.
"""

import asyncio
import sys
from typing import Any

import grpc.aio

from kvpool.tier import Arena
from kvpool.wire.channel import SERVER_OPTIONS, bind
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.pool_server import add_pool

NODE_ID = "ab" * 16


class Everything:
    """A handler that checks no lease: leases are the node's business and tested there."""

    identity = NodeIdentity(NODE_ID, 1)

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def window(self, lease_id: int, offset: int, length: int, *, write: bool) -> Any:
        return self._arena.view(offset, length)


async def main() -> None:
    with Arena.create(sys.argv[1], NODE_ID, 1, int(sys.argv[2])) as arena:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        add_pool(server, Everything(arena))  # type: ignore[arg-type]
        address = bind(server, "127.0.0.1:0")
        await server.start()
        print(arena.path, address, flush=True)
        await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
