"""WHAT is asked of a worker and what it answers: plain values, no wire, no torch."""

from kvpool.request.sampling import Sampling
from kvpool.request.work import (
    DecodeEvent,
    DecodeRequest,
    Finished,
    FinishReason,
    FirstToken,
    PrefillEvent,
    PrefillRequest,
    Published,
    StageTimes,
    Started,
    TokenOut,
    TokenSources,
    WorkerStatus,
)

__all__ = [
    "DecodeEvent",
    "DecodeRequest",
    "FinishReason",
    "Finished",
    "FirstToken",
    "PrefillEvent",
    "PrefillRequest",
    "Published",
    "Sampling",
    "StageTimes",
    "Started",
    "TokenOut",
    "TokenSources",
    "WorkerStatus",
]
