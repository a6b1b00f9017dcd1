"""A client's end of a pool node's control plane: plain values in and out, kvpool errors only."""

from collections.abc import Sequence
from typing import Any

from kvpool.errors import ProtocolError
from kvpool.request.pool import Grant, NodeDescription, Place, Reservation, Stored
from kvpool.wire import convert
from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.gen import pool_pb2 as pb
from kvpool.wire.gen import pool_pb2_grpc as rpc
from kvpool.wire.node_rpc import NodeRpc


class PoolRpc(NodeRpc):
    """The control connection to one node at `address` (host:port), for use on one event loop.

    `node` is whom the calls are meant for; without it only `describe` and `lookup` are answered.
    Every call takes its time limit in seconds. Errors: `ConfigError`, `UnavailableError`, `DeadlineError`, `ProtocolError`.
    """

    def __init__(self, address: str, node: NodeIdentity | None = None, security: Security = PLAIN) -> None:
        super().__init__(address, node, security)
        self._stub: Any = rpc.PoolStub(self._channel)

    async def describe(self, timeout_s: float) -> NodeDescription:
        """Who the node is, its books and how its bytes can be reached."""
        return convert.description_from_pb(await self._call(self._stub.Describe, pb.DescribeRequest(), timeout_s))

    async def lookup(self, keys: Sequence[bytes], timeout_s: float) -> bytes:
        """One byte a key: 0 absent, 1 in the arena, 2 in GPU memory, 3 on a slower tier, 4 a near copy. No lease, and no use of a block."""
        answer = await self._call(self._stub.Lookup, pb.LookupRequest(keys=keys), timeout_s)
        self._same_length(len(answer.present), len(keys))
        present: bytes = answer.present
        return present

    async def reserve(
        self,
        owner: str,
        lease_ms: int,
        blocks: Sequence[Reservation],
        timeout_s: float,
        *,
        sequence: int = 0,
        tenant: str = "",
        near: bool = False,
    ) -> tuple[int, list[Grant]]:
        """Ask for room for `blocks`: (lease id or 0, one grant a block). `sequence`: tokens of the whole prompt, 0 unknown.

        `near`: copies for readers close by, beside the pool's own: against no quota, the first to leave.
        """
        spelled = convert.reservations_to_pb(blocks)
        request = pb.ReserveRequest(owner=owner, lease_ms=lease_ms, blocks=spelled, sequence=sequence, tenant=tenant, near=near)
        answer = await self._call(self._stub.Reserve, request, timeout_s)
        self._same_length(len(answer.grants), len(blocks))
        try:
            return answer.lease_id, convert.grants_from_pb(answer.grants)
        except ValueError as error:
            raise ProtocolError(f"{self.address}: {error}") from error

    async def commit(self, lease_id: int, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        """Publish what was written under a lease; False for keys whose lease had ended."""
        answer = await self._call(self._stub.Commit, pb.CommitRequest(lease_id=lease_id, keys=keys), timeout_s)
        self._same_length(len(answer.committed), len(keys))
        return list(answer.committed)

    async def acquire(
        self, owner: str, lease_ms: int, keys: Sequence[bytes], timeout_s: float, *, sequence: int = 0, fetch_from: Sequence[str] = ()
    ) -> tuple[int, list[Place | None]]:
        """Take a read lease on those of `keys` that are there: (lease id or 0, one place or None a key).

        The node may take most of `timeout_s` to fetch blocks from a slower tier, and then from the nodes `fetch_from` (ids, in order),
        keeping near copies of them. `sequence`: tokens of the whole prompt, 0 unknown.
        """
        request = pb.AcquireRequest(owner=owner, lease_ms=lease_ms, keys=keys, sequence=sequence, fetch_from=fetch_from)
        answer = await self._call(self._stub.Acquire, request, timeout_s)
        self._same_length(len(answer.found), len(keys))
        return answer.lease_id, convert.places_from_pb(answer.found)

    async def acquire_stored(self, owner: str, lease_ms: int, keys: Sequence[bytes], timeout_s: float) -> tuple[int, list[Stored | None]]:
        """As `acquire`, with what it takes to store each block elsewhere."""
        request = pb.AcquireRequest(owner=owner, lease_ms=lease_ms, keys=keys, detail=True)
        answer = await self._call(self._stub.Acquire, request, timeout_s)
        self._same_length(len(answer.found), len(keys))
        return answer.lease_id, convert.stored_from_pb(answer.found)

    async def renew(self, lease_id: int, lease_ms: int, timeout_s: float) -> bool:
        """Move a lease's deadline; False when it had ended."""
        answer = await self._call(self._stub.Renew, pb.RenewRequest(lease_id=lease_id, lease_ms=lease_ms), timeout_s)
        return bool(answer.alive)

    async def release(self, lease_id: int, suspect: Sequence[bytes], timeout_s: float) -> None:
        """End a lease. `suspect` names keys whose bytes failed validation here: the node checks and drops them."""
        await self._call(self._stub.Release, pb.ReleaseRequest(lease_id=lease_id, suspect=suspect), timeout_s)
