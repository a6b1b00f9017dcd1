"""WHAT is asked of a worker and what it answers: plain values, no wire, no torch."""

from kvpool.request.sampling import Sampling
from kvpool.request.scope import EVERYBODY, Scope
from kvpool.request.work import (
    MAX_HAND_OFF,
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
    "EVERYBODY",
    "MAX_HAND_OFF",
    "DecodeEvent",
    "DecodeRequest",
    "FinishReason",
    "Finished",
    "FirstToken",
    "PrefillEvent",
    "PrefillRequest",
    "Published",
    "Sampling",
    "Scope",
    "StageTimes",
    "Started",
    "TokenOut",
    "TokenSources",
    "WorkerStatus",
]
