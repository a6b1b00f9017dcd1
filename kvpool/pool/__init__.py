"""THE protocol core of one pool node: index, leases, ledger of bytes, transitions. Pure."""

from kvpool.pool.limits import PoolLimits
from kvpool.pool.state import TRANSITIONS, PoolState
from kvpool.pool.story import InvariantError
from kvpool.pool.values import EXISTS, NO_SPACE, Acquired, Books, Grant, Granted, Location, Outcome, Reserve, Reserved

__all__ = [
    "EXISTS",
    "NO_SPACE",
    "TRANSITIONS",
    "Acquired",
    "Books",
    "Grant",
    "Granted",
    "InvariantError",
    "Location",
    "Outcome",
    "PoolLimits",
    "PoolState",
    "Reserve",
    "Reserved",
]
