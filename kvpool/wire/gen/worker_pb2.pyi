from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    STOP: _ClassVar[FinishReason]
    LENGTH: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
STOP: FinishReason
LENGTH: FinishReason

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty", "bias_tokens", "biases", "logprobs")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    BIAS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BIASES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    presence_penalty: float
    frequency_penalty: float
    bias_tokens: _containers.RepeatedScalarFieldContainer[int]
    biases: _containers.RepeatedScalarFieldContainer[float]
    logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., bias_tokens: _Optional[_Iterable[int]] = ..., biases: _Optional[_Iterable[float]] = ..., logprobs: _Optional[int] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("chosen", "top_tokens", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: float
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, chosen: _Optional[float] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top: _Optional[_Iterable[float]] = ...) -> None: ...

class TokenSources(_message.Message):
    __slots__ = ("resident", "pool", "computed")
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    resident: int
    pool: int
    computed: int
    def __init__(self, resident: _Optional[int] = ..., pool: _Optional[int] = ..., computed: _Optional[int] = ...) -> None: ...

class StageTimes(_message.Message):
    __slots__ = ("queue_ns", "load_ns", "compute_ns", "sample_ns")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    LOAD_NS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_NS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_NS_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    load_ns: int
    compute_ns: int
    sample_ns: int
    def __init__(self, queue_ns: _Optional[int] = ..., load_ns: _Optional[int] = ..., compute_ns: _Optional[int] = ..., sample_ns: _Optional[int] = ...) -> None: ...

class Scope(_message.Message):
    __slots__ = ("salt", "tenant")
    SALT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    salt: bytes
    tenant: str
    def __init__(self, salt: _Optional[bytes] = ..., tenant: _Optional[str] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "sampling", "hand_off", "scope")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    HAND_OFF_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    hand_off: _containers.RepeatedScalarFieldContainer[str]
    scope: Scope
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., hand_off: _Optional[_Iterable[str]] = ..., scope: _Optional[_Union[Scope, _Mapping]] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("first_token", "published")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    first_token: FirstToken
    published: Published
    def __init__(self, first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., published: _Optional[_Union[Published, _Mapping]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token", "sources", "times", "logprobs")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token: int
    sources: TokenSources
    times: StageTimes
    logprobs: Logprobs
    def __init__(self, token: _Optional[int] = ..., sources: _Optional[_Union[TokenSources, _Mapping]] = ..., times: _Optional[_Union[StageTimes, _Mapping]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ...) -> None: ...

class Published(_message.Message):
    __slots__ = ("tokens", "blocks_written")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    blocks_written: int
    def __init__(self, tokens: _Optional[int] = ..., blocks_written: _Optional[int] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "generated", "max_tokens", "stop_tokens", "sampling", "attention", "scope")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: _containers.RepeatedScalarFieldContainer[int]
    generated: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    stop_tokens: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    attention: str
    scope: Scope
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[_Iterable[int]] = ..., generated: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., stop_tokens: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., attention: _Optional[str] = ..., scope: _Optional[_Union[Scope, _Mapping]] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("started", "token", "finished", "logprobs")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    started: Started
    token: int
    finished: FinishReason
    logprobs: Logprobs
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., token: _Optional[int] = ..., finished: _Optional[_Union[FinishReason, str]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("sources", "times")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    sources: TokenSources
    times: StageTimes
    def __init__(self, sources: _Optional[_Union[TokenSources, _Mapping]] = ..., times: _Optional[_Union[StageTimes, _Mapping]] = ...) -> None: ...

class WorkerStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("role", "model", "active_requests", "queued_requests", "finished_requests", "failed_requests", "prefill_tokens_per_s", "resident_tokens", "reaches")
    class ReachesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REACHES_FIELD_NUMBER: _ClassVar[int]
    role: str
    model: str
    active_requests: int
    queued_requests: int
    finished_requests: int
    failed_requests: int
    prefill_tokens_per_s: float
    resident_tokens: int
    reaches: _containers.ScalarMap[str, str]
    def __init__(self, role: _Optional[str] = ..., model: _Optional[str] = ..., active_requests: _Optional[int] = ..., queued_requests: _Optional[int] = ..., finished_requests: _Optional[int] = ..., failed_requests: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., resident_tokens: _Optional[int] = ..., reaches: _Optional[_Mapping[str, str]] = ...) -> None: ...
