"""An operator's end of a pool node's admin calls: plain values in and out, kvpool errors only."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvpool.errors import ProtocolError
from kvpool.request import admin as a
from kvpool.wire import convert_admin as convert
from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.gen import admin_pb2 as pb
from kvpool.wire.gen import admin_pb2_grpc as rpc
from kvpool.wire.node_rpc import NodeRpc

T = TypeVar("T")


class AdminRpc(NodeRpc):
    """The operator's connection to one node at `address` (host:port), for use on one event loop.

    `node` is whom the calls are meant for; without it only `inspect`, `quotas`, `tiers` and `balance` are answered.
    Every call takes its time limit in seconds. Errors: `ConfigError` (also, before anything is sent, for what breaks a bound of
    `kvpool.request.admin`), `UnavailableError`, `DeadlineError`, `ProtocolError` (also from a node too old to know the call).
    """

    def __init__(self, address: str, node: NodeIdentity | None = None, security: Security = PLAIN) -> None:
        super().__init__(address, node, security)
        self._stub: Any = rpc.AdminStub(self._channel)

    async def inspect(self, keys: Sequence[bytes], timeout_s: float, *, story: bool = False) -> list[a.Inspection]:
        """What the node knows of each key; at most `MAX_INSPECT_KEYS`, with stories `MAX_STORY_KEYS`."""
        request = pb.InspectRequest(keys=convert.checked_keys(keys, convert.inspect_limit(story)), story=story)
        answer = await self._call(self._stub.Inspect, request, timeout_s)
        blocks = [convert.inspection_from_pb(block) for block in answer.blocks]
        self._same_length(len(blocks), len(keys))
        if [block.key for block in blocks] != list(keys):
            raise ProtocolError(f"{self.address}: answered for other keys than it was asked for")
        return blocks

    async def evict(self, keys: Sequence[bytes], timeout_s: float, *, dry_run: bool = False) -> list[a.EvictOutcome]:
        """Remove blocks from every tier of the node, or say what would become of them; one outcome a key."""
        request = pb.EvictRequest(keys=convert.checked_keys(keys), dry_run=dry_run)
        outcomes = self._known(convert.evictions_from_pb, await self._call(self._stub.Evict, request, timeout_s))
        self._same_length(len(outcomes), len(keys))
        return outcomes

    async def pin(self, keys: Sequence[bytes], timeout_s: float, *, owner: str, duration_ms: int, hard: bool = False) -> list[a.PinOutcome]:
        """Keep blocks for `duration_ms` (at most `MAX_PIN_MS`) in the name of `owner`; one outcome a key."""
        request = pb.PinRequest(
            keys=convert.checked_keys(keys),
            hard=hard,
            duration_ms=convert.checked_range("a pin's duration in ms", duration_ms, 1, a.MAX_PIN_MS),
            owner=convert.checked_text("the pin's owner", owner, needed=True),
        )
        outcomes = self._known(convert.pins_from_pb, await self._call(self._stub.Pin, request, timeout_s))
        self._same_length(len(outcomes), len(keys))
        return outcomes

    async def unpin(self, keys: Sequence[bytes], timeout_s: float, *, owner: str) -> int:
        """End `owner`'s pins on these blocks; how many there were."""
        request = pb.UnpinRequest(keys=convert.checked_keys(keys), owner=convert.checked_text("the pin's owner", owner, needed=True))
        return int((await self._call(self._stub.Unpin, request, timeout_s)).unpinned)

    async def set_quota(self, tenant: str, max_bytes: int, timeout_s: float) -> None:
        """Bound a tenant's bytes on the node; 0 removes the bound."""
        convert.checked_range("max_bytes", max_bytes, 0, (1 << 63) - 1)
        request = pb.SetQuotaRequest(tenant=convert.checked_text("the tenant", tenant), max_bytes=max_bytes)
        await self._call(self._stub.SetQuota, request, timeout_s)

    async def quotas(self, timeout_s: float) -> list[a.Quota]:
        """The node's tenants, their bytes and quotas."""
        return convert.quotas_from_pb(await self._call(self._stub.Quotas, pb.QuotasRequest(), timeout_s))

    async def gc(self, timeout_s: float, *, dry_run: bool = False) -> a.GcReport:
        """End what has run out and give dead room back, or count it."""
        return convert.gc_from_pb(await self._call(self._stub.Gc, pb.GcRequest(dry_run=dry_run), timeout_s))

    async def verify(self, tier: str, timeout_s: float, *, cursor: str = "", max_bytes: int = a.MAX_SCRUB_BYTES) -> a.VerifyReport:
        """One step of a scrub of `tier`, at most `MAX_SCRUB_BYTES`; go on with the answer's cursor until it is empty."""
        request = pb.VerifyRequest(
            tier=convert.checked_text("the tier", tier, needed=True),
            cursor=convert.checked_text("the cursor", cursor),
            max_bytes=convert.checked_range("max_bytes", max_bytes, 1, a.MAX_SCRUB_BYTES),
        )
        return convert.verified_from_pb(await self._call(self._stub.Verify, request, timeout_s))

    async def tiers(self, timeout_s: float) -> list[a.TierReport]:
        """The books of the node's tiers, fastest first."""
        return convert.tiers_from_pb(await self._call(self._stub.Tiers, pb.TiersRequest(), timeout_s))

    async def drain(self, timeout_s: float, *, cancel: bool = False, bytes_per_s: int = 0) -> a.Balance:
        """Have the node move everything it holds to others (`cancel`: no longer), and how far it is; ask `balance` how it gets on."""
        request = pb.DrainRequest(cancel=cancel, bytes_per_s=convert.checked_range("bytes_per_s", bytes_per_s, 0, (1 << 63) - 1))
        return convert.balance_from_pb(await self._call(self._stub.Drain, request, timeout_s))

    async def balance(self, timeout_s: float) -> a.Balance:
        """How far the node is with moving blocks to where they belong."""
        return convert.balance_from_pb(await self._call(self._stub.Balance, pb.BalanceRequest(), timeout_s))

    def _known(self, read: Callable[[Any], T], message: Any) -> T:
        try:
            return read(message)
        except ValueError as error:
            raise ProtocolError(f"{self.address}: {error}; is the node newer than this client?") from error
