"""WHAT is asked of a worker and what it answers: plain values, no wire, no torch."""

from kvpool.request.sampling import MAX_LOGIT_BIAS, MAX_LOGPROBS, Logprobs, Sampling
from kvpool.request.scope import EVERYBODY, Scope
from kvpool.request.work import (
    DRAINING,
    MAX_ATTENTION_CHARS,
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
    "DRAINING",
    "EVERYBODY",
    "MAX_ATTENTION_CHARS",
    "MAX_HAND_OFF",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "DecodeEvent",
    "DecodeRequest",
    "FinishReason",
    "Finished",
    "FirstToken",
    "Logprobs",
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
