"""A trace sent to a router: made-up prompts that share what the trace shares, at the trace's own times."""

from kvpool.replay.live.caller import Caller, Endpoint, Result
from kvpool.replay.live.report import Report, report
from kvpool.replay.live.run import Plan, run

__all__ = ["Caller", "Endpoint", "Plan", "Report", "Result", "report", "run"]
