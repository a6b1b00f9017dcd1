"""How long a client asks for a lease, and how it keeps one for as long as a transfer runs.

A lease is sized by the bytes it is for: long enough for a slow link, short enough that a client that dies doesn't hold memory for long.
While the transfer runs it is renewed at a third of its length, away from the thread that moves the bytes. A lease that is lost all the
same (the node restarted, or this process was stopped for longer than the lease) is left alone from then on: what had arrived was validated,
the rest is read elsewhere or is a miss, and nothing more is written to places that may be somebody else's by now.
"""

import asyncio
import logging
import time

from kvpool.client.transfer import SLOWEST_BYTES_PER_S, Transfer
from kvpool.errors import RemoteError
from kvpool.units import MS

log = logging.getLogger(__name__)

BASE_MS = 3_000
SLOWEST_BYTES_PER_MS = SLOWEST_BYTES_PER_S // 1000
MARGIN_MS = 1_000
_CALL_S = 2.0


def lease_ms(nbytes: int, deadline_ns: int) -> int:
    """The lease to ask for `nbytes` that are wanted until `deadline_ns`: never longer than that and a margin."""
    left_ms = max(0, (deadline_ns - time.monotonic_ns()) // MS)
    return int(min(left_ms + MARGIN_MS, BASE_MS + nbytes // SLOWEST_BYTES_PER_MS))


async def keep_alive(transfer: Transfer, length_ms: int) -> None:
    """Renew the transfer's leases until cancelled, or none is left; those that are lost are named to the transfer."""
    while len(transfer.lost) < len(transfer.leases):
        await asyncio.sleep(length_ms / 3000)
        await asyncio.gather(
            *(_renew(transfer, number, length_ms) for number in range(len(transfer.leases)) if number not in transfer.lost)
        )


async def _renew(transfer: Transfer, number: int, length_ms: int) -> None:
    lease = transfer.leases[number]
    node_id = lease.link.node.node_id
    try:
        alive = await lease.link.rpc.renew(lease.id, length_ms, min(_CALL_S, length_ms / 3000))
    except RemoteError as error:
        log.debug("renewal on node %s: %s; tried again before the lease runs out", node_id[:8], error)
        return
    if not alive:
        log.warning("lease %d on node %s was lost during a transfer", lease.id, node_id[:8])
        transfer.lost.add(number)
