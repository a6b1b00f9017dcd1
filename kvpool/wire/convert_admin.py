"""Admin messages: generated protobuf <-> plain values of `kvpool.request.admin`, and the bounds both ends hold to.

What is asked is checked on both ends and refused whole. What is answered is for people to read: texts and lists beyond their
bounds are cut, and counts say of how much.
"""

from collections.abc import Mapping, Sequence

from kvpool.block import KEY_BYTES, BlockKey
from kvpool.errors import ConfigError
from kvpool.request import admin as a
from kvpool.wire.gen import admin_pb2 as pb


def checked_keys(raw: Sequence[bytes], limit: int = a.MAX_ADMIN_KEYS) -> list[BlockKey]:
    """The keys of one call; `ConfigError` for too many, or for one that isn't 32 bytes."""
    if len(raw) > limit:
        raise ConfigError(f"{len(raw)} keys in one call are more than {limit}; split the call")
    for key in raw:
        if len(key) != KEY_BYTES:
            raise ConfigError(f"a block key has {KEY_BYTES} bytes, got {len(key)}")
    return [BlockKey(bytes(key)) for key in raw]


def checked_text(what: str, text: str, *, needed: bool = False) -> str:
    """A name in a call; `ConfigError` when it is too long, or empty though it is needed."""
    if len(text) > a.MAX_TEXT_CHARS:
        raise ConfigError(f"{what} has {len(text)} characters; {a.MAX_TEXT_CHARS} at most")
    if needed and not text:
        raise ConfigError(f"{what} must not be empty")
    return text


def checked_range(what: str, value: int, least: int, most: int) -> int:
    """A number in a call; `ConfigError` outside `least`..`most`."""
    if not least <= value <= most:
        raise ConfigError(f"{what} must be between {least} and {most}, got {value}")
    return value


def inspect_limit(story: bool) -> int:
    """Most keys of one inspect."""
    return a.MAX_STORY_KEYS if story else a.MAX_INSPECT_KEYS


def inspection_to_pb(value: a.Inspection) -> pb.Inspection:
    """Spell what a node knows of a key."""
    message = pb.Inspection(
        key=value.key,
        tiers=[pb.TierPlace(name=_cut(t.name), length=t.length, offset=t.offset, state=_cut(t.state)) for t in value.tiers[: a.MAX_TIERS]],
        parent=value.parent,
        depth=value.depth,
        n_tokens=value.n_tokens,
        codec=_cut(value.codec),
        flags=value.flags,
        size=value.size,
        age_ms=value.age_ms,
        idle_ms=value.idle_ms,
        hits=value.hits,
        priority=value.priority,
        tenant=_cut(value.tenant),
        leases=[pb.LeaseHolder(id=x.id, owner=_cut(x.owner), kind=_cut(x.kind), left_ms=x.left_ms) for x in value.leases[: a.MAX_HOLDERS]],
        lease_count=max(value.lease_count, len(value.leases)),
        pins=[pb.PinHolder(owner=_cut(x.owner), hard=x.hard, left_ms=x.left_ms) for x in value.pins[: a.MAX_HOLDERS]],
        pin_count=max(value.pin_count, len(value.pins)),
        story=[_cut(line) for line in value.story[-a.MAX_STORY_LINES :]],
    )
    if value.ttl_left_ms is not None:
        message.ttl_left_ms = value.ttl_left_ms
    return message


def inspection_from_pb(message: pb.Inspection) -> a.Inspection:
    """Read what a node knows of a key."""
    return a.Inspection(
        key=message.key,
        tiers=tuple(a.TierPlace(name=t.name, length=t.length, offset=t.offset, state=t.state) for t in message.tiers),
        parent=message.parent,
        depth=message.depth,
        n_tokens=message.n_tokens,
        codec=message.codec,
        flags=message.flags,
        size=message.size,
        age_ms=message.age_ms,
        idle_ms=message.idle_ms,
        hits=message.hits,
        ttl_left_ms=message.ttl_left_ms if message.HasField("ttl_left_ms") else None,
        priority=message.priority,
        tenant=message.tenant,
        leases=tuple(a.LeaseHolder(id=x.id, owner=x.owner, kind=x.kind, left_ms=x.left_ms) for x in message.leases),
        lease_count=message.lease_count,
        pins=tuple(a.PinHolder(owner=x.owner, hard=x.hard, left_ms=x.left_ms) for x in message.pins),
        pin_count=message.pin_count,
        story=tuple(message.story),
    )


def evictions_to_pb(outcomes: Sequence[a.EvictOutcome]) -> pb.EvictResponse:
    """Spell what became of blocks to evict."""
    return pb.EvictResponse(outcomes=[pb.EvictResponse.Outcome.Name(outcome) for outcome in outcomes])


def evictions_from_pb(message: pb.EvictResponse) -> list[a.EvictOutcome]:
    """Read what became of blocks to evict; `ValueError` for an outcome we don't know."""
    return [a.EvictOutcome(outcome) for outcome in message.outcomes]


def pins_to_pb(outcomes: Sequence[a.PinOutcome]) -> pb.PinResponse:
    """Spell what became of pins."""
    return pb.PinResponse(outcomes=[pb.PinResponse.Outcome.Name(outcome) for outcome in outcomes])


def pins_from_pb(message: pb.PinResponse) -> list[a.PinOutcome]:
    """Read what became of pins; `ValueError` for an outcome we don't know."""
    return [a.PinOutcome(outcome) for outcome in message.outcomes]


def quotas_to_pb(values: Sequence[a.Quota]) -> pb.QuotasResponse:
    """Spell tenants and their quotas."""
    return pb.QuotasResponse(
        quotas=[pb.Quota(tenant=_cut(q.tenant), used_bytes=q.used_bytes, max_bytes=q.max_bytes) for q in values[: a.MAX_QUOTAS]]
    )


def quotas_from_pb(message: pb.QuotasResponse) -> list[a.Quota]:
    """Read tenants and their quotas."""
    return [
        a.Quota(tenant=q.tenant, used_bytes=q.used_bytes, max_bytes=q.max_bytes if q.HasField("max_bytes") else None)
        for q in message.quotas
    ]


def gc_to_pb(value: a.GcReport) -> pb.GcResponse:
    """Spell a collection's report."""
    return pb.GcResponse(
        expired_leases=value.expired_leases,
        expired_blocks=value.expired_blocks,
        orphan_blocks=value.orphan_blocks,
        orphan_bytes=value.orphan_bytes,
        dead_bytes=value.dead_bytes,
        reclaimed_bytes=value.reclaimed_bytes,
    )


def gc_from_pb(message: pb.GcResponse) -> a.GcReport:
    """Read a collection's report."""
    return a.GcReport(
        expired_leases=message.expired_leases,
        expired_blocks=message.expired_blocks,
        orphan_blocks=message.orphan_blocks,
        orphan_bytes=message.orphan_bytes,
        dead_bytes=message.dead_bytes,
        reclaimed_bytes=message.reclaimed_bytes,
    )


def verified_to_pb(value: a.VerifyReport) -> pb.VerifyResponse:
    """Spell one step of a scrub. The cursor must come back as it is, so one that is too long is the node's `ConfigError`."""
    return pb.VerifyResponse(
        checked=value.checked,
        checked_bytes=value.checked_bytes,
        corrupt=value.corrupt[: a.MAX_CORRUPT_KEYS],
        corrupt_count=max(value.corrupt_count, len(value.corrupt)),
        cursor=checked_text("the cursor", value.cursor),
    )


def verified_from_pb(message: pb.VerifyResponse) -> a.VerifyReport:
    """Read one step of a scrub."""
    return a.VerifyReport(
        checked=message.checked,
        checked_bytes=message.checked_bytes,
        corrupt=tuple(message.corrupt),
        corrupt_count=message.corrupt_count,
        cursor=message.cursor,
    )


def tiers_to_pb(values: Sequence[a.TierReport]) -> pb.TiersResponse:
    """Spell the books of a node's tiers."""
    return pb.TiersResponse(
        tiers=[
            pb.TierReport(
                name=_cut(t.name),
                state=_cut(t.state),
                reason=_cut(t.reason),
                capacity_bytes=t.capacity_bytes,
                used_bytes=t.used_bytes,
                objects=t.objects,
                max_objects=t.max_objects,
                counters=_cut_counters(t.counters),
            )
            for t in values[: a.MAX_TIERS]
        ]
    )


def tiers_from_pb(message: pb.TiersResponse) -> list[a.TierReport]:
    """Read the books of a node's tiers."""
    return [
        a.TierReport(
            name=t.name,
            state=t.state,
            reason=t.reason,
            capacity_bytes=t.capacity_bytes,
            used_bytes=t.used_bytes,
            objects=t.objects,
            max_objects=t.max_objects,
            counters=dict(t.counters),
        )
        for t in message.tiers
    ]


def _cut(text: str) -> str:
    return text if len(text) <= a.MAX_TEXT_CHARS else text[: a.MAX_TEXT_CHARS - 1] + "…"


def balance_to_pb(value: a.Balance) -> pb.BalanceResponse:
    """Spell how far a node is with moving blocks."""
    return pb.BalanceResponse(
        state=_cut(value.state),
        settled=value.settled,
        rounds=value.rounds,
        blocks=value.blocks,
        block_bytes=value.block_bytes,
        safe_blocks=value.safe_blocks,
        safe_bytes=value.safe_bytes,
        counters=dict(list(value.counters.items())[: a.MAX_COUNTERS]),
    )


def balance_from_pb(message: pb.BalanceResponse) -> a.Balance:
    """Read how far a node is with moving blocks."""
    return a.Balance(
        state=message.state,
        settled=message.settled,
        rounds=message.rounds,
        blocks=message.blocks,
        block_bytes=message.block_bytes,
        safe_blocks=message.safe_blocks,
        safe_bytes=message.safe_bytes,
        counters=dict(message.counters),
    )


def _cut_counters(counters: Mapping[str, int]) -> dict[str, int]:
    return {_cut(name): counters[name] for name in sorted(counters)[: a.MAX_COUNTERS]}
