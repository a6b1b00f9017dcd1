"""One request as the dispatcher sees it (`Job`), and the record of what happened to it (`Trace`)."""

from dataclasses import dataclass, field

from kvpool.request import EVERYBODY, FinishReason, Logprobs, Sampling, Scope, StageTimes, TokenSources


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Continue `prompt` by at most `max_tokens` tokens, ending after any of `stop_tokens`; `deadline_ns` is monotonic.

    As the caller says: `user`, one of the tenant's own users ("": it doesn't say); `session`, what its requests of one conversation
    have in common; `priority`, 0 as usual, lower is more urgent; `attention`, the technique to decode with, "" for the workers' own;
    `adapter`, the LoRA adapter to answer with, "" for none.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    stop_tokens: tuple[int, ...]
    sampling: Sampling
    deadline_ns: int
    scope: Scope = EVERYBODY
    user: str = ""
    session: str = ""
    priority: int = 0
    attention: str = ""
    adapter: str = ""


@dataclass(slots=True, kw_only=True)
class Trace:
    """What happened to one request so far; filled in while it runs, read for usage, logs and metrics.

    Times are nanoseconds; `first_token_ns` and `total_ns` count from the request's arrival (`arrived_ns`, monotonic).
    """

    arrived_ns: int
    tokenize_ns: int = 0
    route_ns: int = 0
    first_token_ns: int = 0
    publish_ns: int = 0
    decode_start_ns: int = 0
    total_ns: int = 0
    queued_ns: int = 0
    """How long it stood in line."""
    followed: int = 0
    """For how many others it waited, who computed what it needed."""
    direct: bool = False
    """It went to a decode worker at once, though there was a prefill worker."""
    attention: str = ""
    """The technique that it is decoded with; "" before it is, and with workers that don't say theirs."""
    prefill_worker: str | None = None
    decode_worker: str | None = None
    sources: TokenSources | None = None
    """Where the prompt's KV came from: of the prefill, or of the first decode when there was none."""
    times: StageTimes = field(default_factory=StageTimes)
    decode_sources: TokenSources | None = None
    decode_times: StageTimes = field(default_factory=StageTimes)
    generated: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    """Of each generated token, when the request asked for them."""
    reason: FinishReason | None = None
    retries: int = 0
    fallbacks: list[str] = field(default_factory=list)

    def fell_back(self, reason: str) -> None:
        """Note that the request took another way than planned; each reason once."""
        if reason not in self.fallbacks:
            self.fallbacks.append(reason)

    def first_token_at(self, now_ns: int) -> None:
        """Note the time of the first token; later calls change nothing."""
        if not self.first_token_ns:
            self.first_token_ns = max(1, now_ns - self.arrived_ns)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was not computed for this request."""
        return self.sources.cached if self.sources is not None else 0

    def times_ms(self) -> dict[str, float]:
        """Where the time went, in milliseconds: stages of the prefill (or of the decode that stood in), then of the decode."""
        stages = {
            "tokenize": self.tokenize_ns,
            "route": self.route_ns,
            "queue": self.times.queue_ns,
            "load": self.times.load_ns,
            "compute": self.times.compute_ns,
            "sample": self.times.sample_ns,
            "first_token": self.first_token_ns,
            "publish": self.publish_ns,
            "decode_start": self.decode_start_ns,
            "decode_queue": self.decode_times.queue_ns,
            "decode_load": self.decode_times.load_ns,
            "decode_compute": self.decode_times.compute_ns,
            "total": self.total_ns,
        }
        return {name: round(value / 1e6, 3) for name, value in stages.items()}
