"""THE protocol core of one pool node: index, leases, ledger of bytes, transitions. Pure."""

from kvpool.pool.announcer import Announcer
from kvpool.pool.blocks import TRANSITIONS
from kvpool.pool.limits import PoolLimits
from kvpool.pool.state import PoolState
from kvpool.pool.story import InvariantError
from kvpool.pool.values import (
    EXISTS,
    NO_SPACE,
    Acquired,
    BlockView,
    Books,
    Grant,
    Granted,
    Holder,
    Location,
    Move,
    Outcome,
    Pin,
    PinOutcome,
    Quota,
    Reserve,
    Reserved,
    SlabGrant,
)

__all__ = [
    "EXISTS",
    "NO_SPACE",
    "TRANSITIONS",
    "Acquired",
    "Announcer",
    "BlockView",
    "Books",
    "Grant",
    "Granted",
    "Holder",
    "InvariantError",
    "Location",
    "Move",
    "Outcome",
    "Pin",
    "PinOutcome",
    "PoolLimits",
    "PoolState",
    "Quota",
    "Reserve",
    "Reserved",
    "SlabGrant",
]
