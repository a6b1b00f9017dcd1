"""Which worker serves a request: one policy a file, all behind `Policy`, chosen by name with `make_policy` (docs/routing.md)."""

from kvpool.policy.routing.names import OURS, POLICIES, make_policy
from kvpool.policy.routing.ttft import LeastTtft
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
from kvpool.policy.routing.workload import WorkerOrder

__all__ = [
    "OURS",
    "POLICIES",
    "Ask",
    "Candidate",
    "LeastTtft",
    "Load",
    "Observed",
    "Pending",
    "Policy",
    "Ranking",
    "Scored",
    "Source",
    "Tier",
    "WorkerOrder",
    "WorkerRef",
    "make_policy",
]
