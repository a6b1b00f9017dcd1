"""What one router keeps a worker busy with, as it tells the others."""

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

MAX_WORKERS = 4096
"""In one report."""
REPORT_S = 0.2
"""How often a router tells."""
