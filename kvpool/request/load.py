"""What one router tells the others: what it keeps workers busy with, and what is being computed for its requests."""

from typing import NamedTuple


class WorkerLoad(NamedTuple):
    """Of one incarnation of one worker: requests there, those not yet begun to be answered, prompt tokens not computed yet, KV in use."""

    role: str
    id: str
    incarnation: int
    active: int
    queued: int
    backlog_tokens: int
    decode_tokens: int


LoadReport = tuple[WorkerLoad, ...]
"""All workers that a router keeps busy with something."""


class FlightTold(NamedTuple):
    """Blocks that are being computed for a request of the router that tells: block `first` of a chain and those behind it.

    `number` is that router's, for ever; `tags`: the first `TAG_BYTES` of each block's key; `begun`: a worker is at it. When it is `over`,
    the pool holds the `held` leading blocks of the chain.
    """

    number: int
    priority: int
    first: int
    tags: tuple[bytes, ...]
    begun: bool = False
    over: bool = False
    held: int = 0


class RouterReport(NamedTuple):
    """All that a router tells; it replaces what it told before."""

    workers: LoadReport = ()
    flights: tuple[FlightTold, ...] = ()


TAG_BYTES = 8
MAX_WORKERS, MAX_FLIGHTS, MAX_TAGS = 4096, 256, 8192
"""In one report; tags of all its flights together."""
REPORT_S = 0.2
"""How often a router tells."""
