"""Worker messages: generated protobuf <-> plain values of `kvpool.request`."""

from kvpool.errors import ConfigError, ProtocolError
from kvpool.request import (
    EVERYBODY,
    DecodeEvent,
    DecodeRequest,
    Finished,
    FinishReason,
    FirstToken,
    Logprobs,
    PrefillEvent,
    PrefillRequest,
    Published,
    Sampling,
    Scope,
    StageTimes,
    Started,
    TokenOut,
    TokenSources,
    WorkerStatus,
)
from kvpool.wire.gen import worker_pb2 as pb

_REASONS = {FinishReason.STOP: pb.STOP, FinishReason.LENGTH: pb.LENGTH}
_REASONS_BACK = {pb.STOP: FinishReason.STOP, pb.LENGTH: FinishReason.LENGTH}


def _sampling_to_pb(value: Sampling) -> pb.Sampling:
    return pb.Sampling(
        temperature=value.temperature,
        top_p=value.top_p,
        top_k=value.top_k,
        seed=value.seed,
        presence_penalty=value.presence_penalty,
        frequency_penalty=value.frequency_penalty,
        bias_tokens=[token for token, _ in value.logit_bias],
        biases=[bias for _, bias in value.logit_bias],
        logprobs=value.logprobs,
    )


def _sampling_from_pb(message: pb.Sampling) -> Sampling:
    if len(message.bias_tokens) != len(message.biases):
        raise ConfigError(f"{len(message.biases)} biases for {len(message.bias_tokens)} tokens")
    return Sampling(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        seed=message.seed,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple(zip(message.bias_tokens, message.biases, strict=True)),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
    )


def _logprobs_to_pb(value: Logprobs | None) -> pb.Logprobs | None:
    if value is None:
        return None
    return pb.Logprobs(chosen=value.chosen, top_tokens=[token for token, _ in value.top], top=[logprob for _, logprob in value.top])


def _logprobs_from_pb(message: pb.FirstToken | pb.DecodeEvent) -> Logprobs | None:
    if not message.HasField("logprobs"):
        return None
    told = message.logprobs
    if len(told.top_tokens) != len(told.top):
        raise ProtocolError(f"{len(told.top)} log-probabilities for {len(told.top_tokens)} tokens")
    return Logprobs(chosen=told.chosen, top=tuple(zip(told.top_tokens, told.top, strict=True)))


def _scope_to_pb(value: Scope) -> pb.Scope | None:
    return pb.Scope(salt=value.salt, tenant=value.tenant) if value != EVERYBODY else None


def _scope_from_pb(message: pb.Scope) -> Scope:
    return Scope(salt=message.salt, tenant=message.tenant)


def _sources_to_pb(value: TokenSources) -> pb.TokenSources:
    return pb.TokenSources(resident=value.resident, pool=value.pool, computed=value.computed)


def _sources_from_pb(message: pb.TokenSources) -> TokenSources:
    return TokenSources(resident=message.resident, pool=message.pool, computed=message.computed)


def _times_to_pb(value: StageTimes) -> pb.StageTimes:
    return pb.StageTimes(queue_ns=value.queue_ns, load_ns=value.load_ns, compute_ns=value.compute_ns, sample_ns=value.sample_ns)


def _times_from_pb(message: pb.StageTimes) -> StageTimes:
    return StageTimes(queue_ns=message.queue_ns, load_ns=message.load_ns, compute_ns=message.compute_ns, sample_ns=message.sample_ns)


def prefill_to_pb(value: PrefillRequest) -> pb.PrefillRequest:
    """Spell a prefill request."""
    return pb.PrefillRequest(
        request_id=value.request_id,
        prompt=value.prompt,
        sampling=_sampling_to_pb(value.sampling),
        hand_off=value.hand_off,
        scope=_scope_to_pb(value.scope),
    )


def prefill_from_pb(message: pb.PrefillRequest) -> PrefillRequest:
    """Read a prefill request; `ConfigError` for values out of range."""
    return PrefillRequest(
        request_id=message.request_id,
        prompt=tuple(message.prompt),
        sampling=_sampling_from_pb(message.sampling),
        scope=_scope_from_pb(message.scope),
        hand_off=tuple(message.hand_off),
    )


def prefill_event_to_pb(value: PrefillEvent) -> pb.PrefillEvent:
    """Spell a prefill event."""
    if isinstance(value, FirstToken):
        sources, times, logprobs = _sources_to_pb(value.sources), _times_to_pb(value.times), _logprobs_to_pb(value.logprobs)
        first = pb.FirstToken(token=value.token, sources=sources, times=times, logprobs=logprobs)
        return pb.PrefillEvent(first_token=first)
    return pb.PrefillEvent(published=pb.Published(tokens=value.tokens, blocks_written=value.blocks_written))


def prefill_event_from_pb(message: pb.PrefillEvent) -> PrefillEvent:
    """Read a prefill event; `ProtocolError` for one we don't know."""
    kind = message.WhichOneof("event")
    if kind == "first_token":
        first = message.first_token
        sources, times = _sources_from_pb(first.sources), _times_from_pb(first.times)
        return FirstToken(token=first.token, sources=sources, times=times, logprobs=_logprobs_from_pb(first))
    if kind == "published":
        return Published(tokens=message.published.tokens, blocks_written=message.published.blocks_written)
    raise ProtocolError(f"unknown prefill event {kind!r}; is the worker newer than this router?")


def decode_to_pb(value: DecodeRequest) -> pb.DecodeRequest:
    """Spell a decode request; `ConfigError` for one with an adapter, which workers have none of."""
    if value.adapter:
        raise ConfigError(f"a worker has no LoRA adapters, and {value.adapter!r} was asked for; stock engines may have it")
    return pb.DecodeRequest(
        request_id=value.request_id,
        prompt=value.prompt,
        generated=value.generated,
        max_tokens=value.max_tokens,
        stop_tokens=value.stop_tokens,
        sampling=_sampling_to_pb(value.sampling),
        scope=_scope_to_pb(value.scope),
        attention=value.attention,
    )


def decode_from_pb(message: pb.DecodeRequest) -> DecodeRequest:
    """Read a decode request; `ConfigError` for values out of range."""
    return DecodeRequest(
        request_id=message.request_id,
        prompt=tuple(message.prompt),
        generated=tuple(message.generated),
        max_tokens=message.max_tokens,
        stop_tokens=tuple(message.stop_tokens),
        sampling=_sampling_from_pb(message.sampling),
        scope=_scope_from_pb(message.scope),
        attention=message.attention,
    )


def decode_event_to_pb(value: DecodeEvent) -> pb.DecodeEvent:
    """Spell a decode event."""
    if isinstance(value, TokenOut):
        return pb.DecodeEvent(token=value.token, logprobs=_logprobs_to_pb(value.logprobs))
    if isinstance(value, Started):
        return pb.DecodeEvent(started=pb.Started(sources=_sources_to_pb(value.sources), times=_times_to_pb(value.times)))
    return pb.DecodeEvent(finished=_REASONS[value.reason])


def decode_event_from_pb(message: pb.DecodeEvent) -> DecodeEvent:
    """Read a decode event; `ProtocolError` for one we don't know."""
    kind = message.WhichOneof("event")
    if kind == "token":
        return TokenOut(token=message.token, logprobs=_logprobs_from_pb(message))
    if kind == "started":
        return Started(sources=_sources_from_pb(message.started.sources), times=_times_from_pb(message.started.times))
    if kind == "finished" and message.finished in _REASONS_BACK:
        return Finished(reason=_REASONS_BACK[message.finished])
    raise ProtocolError(f"unknown decode event {kind!r}; is the worker newer than this router?")


def status_to_pb(value: WorkerStatus) -> pb.WorkerStatus:
    """Spell a worker's status."""
    return pb.WorkerStatus(
        role=value.role,
        model=value.model,
        active_requests=value.active_requests,
        queued_requests=value.queued_requests,
        finished_requests=value.finished_requests,
        failed_requests=value.failed_requests,
        prefill_tokens_per_s=value.prefill_tokens_per_s,
        resident_tokens=value.resident_tokens,
        reaches=value.reaches,
    )


def status_from_pb(message: pb.WorkerStatus) -> WorkerStatus:
    """Read a worker's status."""
    return WorkerStatus(
        role=message.role,
        model=message.model,
        active_requests=message.active_requests,
        queued_requests=message.queued_requests,
        finished_requests=message.finished_requests,
        failed_requests=message.failed_requests,
        prefill_tokens_per_s=message.prefill_tokens_per_s,
        resident_tokens=message.resident_tokens,
        reaches=dict(message.reaches),
    )
