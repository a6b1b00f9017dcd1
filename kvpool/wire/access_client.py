"""A client's end of access.proto: who am I to this server, and an operator's way to set rates."""

from dataclasses import dataclass
from typing import Any

from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.gen import access_pb2 as pb
from kvpool.wire.gen import access_pb2_grpc as rpc
from kvpool.wire.node_rpc import NodeRpc


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a server takes the caller for. `salt` belongs into the namespace of the caller's blocks (b"": none); a secret of its tenant."""

    name: str
    tenant: str | None
    rights: tuple[str, ...]
    salt: bytes

    def __repr__(self) -> str:
        return f"Identity(name={self.name!r}, tenant={self.tenant!r}, rights={self.rights!r})"


class AccessRpc(NodeRpc):
    """The connection to the server at `address`; errors as for `PoolRpc`, and `AccessError`."""

    def __init__(self, address: str, node: NodeIdentity | None = None, security: Security = PLAIN) -> None:
        super().__init__(address, node, security)
        self._stub: Any = rpc.AccessStub(self._channel)

    async def who_am_i(self, timeout_s: float) -> Identity:
        """Who this process is to the server, by its token."""
        answer = await self._call(self._stub.WhoAmI, pb.WhoAmIRequest(), timeout_s)
        tenant = answer.tenant if answer.HasField("tenant") else None
        return Identity(name=answer.name, tenant=tenant, rights=tuple(answer.rights), salt=answer.salt)

    async def set_rates(self, tenant: str, *, requests_per_s: float, bytes_per_s: float, timeout_s: float) -> None:
        """Bound a tenant's calls and bytes per second; 0 removes the bound."""
        request = pb.SetRatesRequest(tenant=tenant, requests_per_s=requests_per_s, bytes_per_s=bytes_per_s)
        await self._call(self._stub.SetRates, request, timeout_s)
