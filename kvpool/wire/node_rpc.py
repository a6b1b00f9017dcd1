"""What every client of a node shares: one connection, whom its calls are meant for, and errors as kvpool's."""

from typing import Any

from kvpool.errors import ProtocolError
from kvpool.wire.channel import open_channel
from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.status import told


class NodeRpc:
    """A connection to the node at `address` (host:port), for use on one event loop. Calls say that they are meant for `node`, if given."""

    def __init__(self, address: str, node: NodeIdentity | None = None, security: Security = PLAIN) -> None:
        self.address = address
        self._node = node.metadata() if node is not None else ()
        self._security = security
        self._channel = open_channel(address, security)

    async def close(self) -> None:
        """Cancel what is in flight and disconnect."""
        await self._channel.close(grace=None)

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """Whom a call is meant for, and who asks; the token may have been replaced since the last one."""
        return (*self._node, *self._security.metadata(self.address))

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        with told(self.address):
            return await method(request, timeout=timeout_s, metadata=self._metadata)

    def _same_length(self, got: int, asked: int) -> None:
        if got != asked:
            raise ProtocolError(f"{self.address}: answered {got} items for {asked}")
