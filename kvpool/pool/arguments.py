"""What a pool's callers may not ask: checked at the edge, before anything changes."""

from collections.abc import Sequence
from operator import eq

from kvpool.block import KEY_BYTES
from kvpool.errors import ConfigError
from kvpool.pool.limits import PoolLimits
from kvpool.pool.values import Reserve

MAX_PRIORITY = 100


def check_call(batch: int, owner: str, duration_ns: int, limits: PoolLimits) -> None:
    """Raise `ConfigError` when a call is too large, its duration is none, or its owner's name too long."""
    check_batch(batch, limits)
    check_duration(duration_ns)
    if len(owner) > limits.max_owner_chars:
        raise ConfigError(f"an owner's name has at most {limits.max_owner_chars} characters, got {len(owner)}")


def check_batch(batch: int, limits: PoolLimits) -> None:
    """Raise `ConfigError` when one call names too many blocks."""
    if batch > limits.max_blocks_per_call:
        raise ConfigError(f"{batch} blocks in one call, at most {limits.max_blocks_per_call}: split the call")


def check_duration(duration_ns: int, name: str = "lease_ns") -> None:
    """Raise `ConfigError` unless a lease or a pin is to last at all."""
    if duration_ns <= 0:
        raise ConfigError(f"{name} must be positive, got {duration_ns}")


def check_items(items: Sequence[Reserve], limits: PoolLimits) -> None:
    """Raise `ConfigError` when one of these reservations makes no sense. All are looked at together, one by one only to say which it is."""
    if not items:
        return
    keys, parents, depths, lengths, ttls_ns, sequences, priorities, priorities_ns, tenants, _ = zip(*items, strict=True)
    sound = {KEY_BYTES}.issuperset(map(len, keys)) and {KEY_BYTES}.issuperset([len(parent) for parent in parents if parent is not None])
    sound = sound and min(lengths) > 0 and min(map(min, (depths, ttls_ns, sequences, priorities, priorities_ns))) >= 0
    sound = sound and max(priorities) <= MAX_PRIORITY and not any(map(eq, keys, parents))
    if not sound or max(map(len, set(tenants))) > limits.max_owner_chars:
        for item in items:
            check_item(item, limits)


def check_item(item: Reserve, limits: PoolLimits) -> None:
    """Raise `ConfigError` for a reservation that makes no sense."""
    key, parent, depth, length, ttl_ns, sequence, priority, priority_ns, tenant, _ = item
    if len(key) != KEY_BYTES or (parent is not None and len(parent) != KEY_BYTES):
        raise ConfigError(f"a key has {KEY_BYTES} bytes; got key {key.hex()}, parent {parent.hex() if parent else None}")
    if length <= 0 or depth < 0 or ttl_ns < 0 or parent == key:
        raise ConfigError(f"block {key.hex()}: length must be positive, depth and ttl_ns not negative, parent another block; got {item}")
    if sequence < 0 or priority_ns < 0 or not 0 <= priority <= MAX_PRIORITY:
        raise ConfigError(f"block {key.hex()}: sequence and priority_ns must not be negative, priority 0 to {MAX_PRIORITY}; got {item}")
    if len(tenant) > limits.max_owner_chars:
        raise ConfigError(f"a tenant's name has at most {limits.max_owner_chars} characters, got {len(tenant)}")
