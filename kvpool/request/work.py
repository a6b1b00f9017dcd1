"""What a router asks of a worker, and what the worker answers, as plain values.

A request lives in two phases. A prefill worker makes the prompt's KV blocks present in the pool and yields the first
token (`PrefillRequest` -> `FirstToken`, then `Published`). A decode worker pulls the blocks and yields the rest
(`DecodeRequest` -> `Started`, `TokenOut`..., `Finished`). A decode worker can always stand in for a dead prefill worker or
a lost pool: whatever it can't pull it computes.
"""

import enum
from dataclasses import dataclass, field

from kvpool.errors import ConfigError
from kvpool.request.sampling import Logprobs, Sampling
from kvpool.request.scope import EVERYBODY, Scope

DRAINING = "draining"
"""The `state` in the member record of a worker that wants no new requests: it leaves when it has served those it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSources:
    """Where the KV of a prompt came from, in tokens: `resident + pool + computed == prompt tokens`."""

    resident: int = 0
    pool: int = 0
    computed: int = 0

    @property
    def cached(self) -> int:
        """Tokens whose KV was not computed for this request."""
        return self.resident + self.pool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Where the time of one phase went, in nanoseconds."""

    queue_ns: int = 0
    load_ns: int = 0
    compute_ns: int = 0
    sample_ns: int = 0


MAX_HAND_OFF = 2
"""Nodes to which one prefill pushes its blocks besides their owners."""
MAX_ATTENTION_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRequest:
    """Compute what the pool lacks of `prompt` (at least one token id) and sample the first token.

    `hand_off`: ids of the pool nodes on the host where the request will go on, at most `MAX_HAND_OFF`; its blocks are pushed to them too.
    Raises `ConfigError` for more.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    scope: Scope = EVERYBODY
    hand_off: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.hand_off) > MAX_HAND_OFF:
            raise ConfigError(f"a prefill is handed off to at most {MAX_HAND_OFF} nodes, got {len(self.hand_off)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    """The prompt's KV is complete in the worker and the first token is known."""

    token: int
    sources: TokenSources
    times: StageTimes
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The pool now holds the first `tokens` tokens of the prompt (the partial tail block included)."""

    tokens: int
    blocks_written: int


PrefillEvent = FirstToken | Published


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRequest:
    """Continue `prompt + generated` up to `max_tokens` generated tokens in all (those in `generated` count).

    Events carry only tokens after `generated`. Stops after a token of `stop_tokens` (which is emitted).

    `attention`: which technique chooses what is read behind the prompt (docs/attention.md), "full" for none, "" for the worker's own; the
    worker refuses one that it can't read. Raises `ConfigError` for a text longer than `MAX_ATTENTION_CHARS`. `adapter`: with which LoRA
    adapter, "" for none; stock engines have some, workers of ours none.
    """

    request_id: str
    prompt: tuple[int, ...]
    generated: tuple[int, ...] = ()
    max_tokens: int
    stop_tokens: tuple[int, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    scope: Scope = EVERYBODY
    attention: str = ""
    adapter: str = ""

    def __post_init__(self) -> None:
        if len(self.attention) > MAX_ATTENTION_CHARS:
            raise ConfigError(f"an attention technique is told in at most {MAX_ATTENTION_CHARS} characters, got {len(self.attention)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The KV of `prompt + generated[:-1]` is complete in the decode worker."""

    sources: TokenSources
    times: StageTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOut:
    """One more token; `logprobs` when the request asked for them."""

    token: int
    logprobs: Logprobs | None = None


class FinishReason(enum.StrEnum):
    """Why a decode ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last event of a decode. `account`: what `Started` left open (no sources at all), from a worker that counts only at the end."""

    reason: FinishReason
    account: Started | None = None


DecodeEvent = Started | TokenOut | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """What a worker says about itself."""

    role: str
    model: str
    active_requests: int
    queued_requests: int
    finished_requests: int
    failed_requests: int
    prefill_tokens_per_s: float
    resident_tokens: int
    reaches: dict[str, str]
    """Reach in use per pool node: node id -> `shm`, `ucx` or `grpc`."""
