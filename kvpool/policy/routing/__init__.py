"""Which worker serves a request: one policy a file, all behind `Policy`, chosen by name with `make_policy`."""

from kvpool.policy.routing.values import (
    Ask,
    Candidate,
    Load,
    Observed,
    Pending,
    Policy,
    Ranking,
    Scored,
    Source,
    Tier,
    WorkerRef,
)

__all__ = ["Ask", "Candidate", "Load", "Observed", "Pending", "Policy", "Ranking", "Scored", "Source", "Tier", "WorkerRef"]
