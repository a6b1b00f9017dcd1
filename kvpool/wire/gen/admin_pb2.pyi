from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InspectRequest(_message.Message):
    __slots__ = ("keys", "story")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    STORY_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    story: bool
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., story: _Optional[bool] = ...) -> None: ...

class InspectResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[Inspection]
    def __init__(self, blocks: _Optional[_Iterable[_Union[Inspection, _Mapping]]] = ...) -> None: ...

class Inspection(_message.Message):
    __slots__ = ("key", "tiers", "parent", "depth", "n_tokens", "codec", "flags", "size", "age_ms", "idle_ms", "hits", "ttl_left_ms", "priority", "tenant", "leases", "lease_count", "pins", "pin_count", "story")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    N_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    TTL_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    PIN_COUNT_FIELD_NUMBER: _ClassVar[int]
    STORY_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    tiers: _containers.RepeatedCompositeFieldContainer[TierPlace]
    parent: bytes
    depth: int
    n_tokens: int
    codec: str
    flags: int
    size: int
    age_ms: int
    idle_ms: int
    hits: int
    ttl_left_ms: int
    priority: int
    tenant: str
    leases: _containers.RepeatedCompositeFieldContainer[LeaseHolder]
    lease_count: int
    pins: _containers.RepeatedCompositeFieldContainer[PinHolder]
    pin_count: int
    story: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, key: _Optional[bytes] = ..., tiers: _Optional[_Iterable[_Union[TierPlace, _Mapping]]] = ..., parent: _Optional[bytes] = ..., depth: _Optional[int] = ..., n_tokens: _Optional[int] = ..., codec: _Optional[str] = ..., flags: _Optional[int] = ..., size: _Optional[int] = ..., age_ms: _Optional[int] = ..., idle_ms: _Optional[int] = ..., hits: _Optional[int] = ..., ttl_left_ms: _Optional[int] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., leases: _Optional[_Iterable[_Union[LeaseHolder, _Mapping]]] = ..., lease_count: _Optional[int] = ..., pins: _Optional[_Iterable[_Union[PinHolder, _Mapping]]] = ..., pin_count: _Optional[int] = ..., story: _Optional[_Iterable[str]] = ...) -> None: ...

class TierPlace(_message.Message):
    __slots__ = ("name", "length", "offset", "state")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    length: int
    offset: int
    state: str
    def __init__(self, name: _Optional[str] = ..., length: _Optional[int] = ..., offset: _Optional[int] = ..., state: _Optional[str] = ...) -> None: ...

class LeaseHolder(_message.Message):
    __slots__ = ("id", "owner", "kind", "left_ms")
    ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    id: int
    owner: str
    kind: str
    left_ms: int
    def __init__(self, id: _Optional[int] = ..., owner: _Optional[str] = ..., kind: _Optional[str] = ..., left_ms: _Optional[int] = ...) -> None: ...

class PinHolder(_message.Message):
    __slots__ = ("owner", "hard", "left_ms")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    HARD_FIELD_NUMBER: _ClassVar[int]
    LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    owner: str
    hard: bool
    left_ms: int
    def __init__(self, owner: _Optional[str] = ..., hard: _Optional[bool] = ..., left_ms: _Optional[int] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("keys", "dry_run")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    dry_run: bool
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("outcomes",)
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        EVICTED: _ClassVar[EvictResponse.Outcome]
        ABSENT: _ClassVar[EvictResponse.Outcome]
        HELD: _ClassVar[EvictResponse.Outcome]
        PINNED: _ClassVar[EvictResponse.Outcome]
    EVICTED: EvictResponse.Outcome
    ABSENT: EvictResponse.Outcome
    HELD: EvictResponse.Outcome
    PINNED: EvictResponse.Outcome
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedScalarFieldContainer[EvictResponse.Outcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[EvictResponse.Outcome, str]]] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("keys", "hard", "duration_ms", "owner")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    HARD_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    hard: bool
    duration_ms: int
    owner: str
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., hard: _Optional[bool] = ..., duration_ms: _Optional[int] = ..., owner: _Optional[str] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("outcomes",)
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PINNED: _ClassVar[PinResponse.Outcome]
        ABSENT: _ClassVar[PinResponse.Outcome]
        REFUSED: _ClassVar[PinResponse.Outcome]
    PINNED: PinResponse.Outcome
    ABSENT: PinResponse.Outcome
    REFUSED: PinResponse.Outcome
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedScalarFieldContainer[PinResponse.Outcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[PinResponse.Outcome, str]]] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("keys", "owner")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    owner: str
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., owner: _Optional[str] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("unpinned",)
    UNPINNED_FIELD_NUMBER: _ClassVar[int]
    unpinned: int
    def __init__(self, unpinned: _Optional[int] = ...) -> None: ...

class SetQuotaRequest(_message.Message):
    __slots__ = ("tenant", "max_bytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    max_bytes: int
    def __init__(self, tenant: _Optional[str] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class SetQuotaResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class QuotasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class QuotasResponse(_message.Message):
    __slots__ = ("quotas",)
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    quotas: _containers.RepeatedCompositeFieldContainer[Quota]
    def __init__(self, quotas: _Optional[_Iterable[_Union[Quota, _Mapping]]] = ...) -> None: ...

class Quota(_message.Message):
    __slots__ = ("tenant", "used_bytes", "max_bytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    used_bytes: int
    max_bytes: int
    def __init__(self, tenant: _Optional[str] = ..., used_bytes: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class GcRequest(_message.Message):
    __slots__ = ("dry_run",)
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    dry_run: bool
    def __init__(self, dry_run: _Optional[bool] = ...) -> None: ...

class GcResponse(_message.Message):
    __slots__ = ("expired_leases", "expired_blocks", "orphan_blocks", "orphan_bytes", "dead_bytes", "reclaimed_bytes")
    EXPIRED_LEASES_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ORPHAN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ORPHAN_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECLAIMED_BYTES_FIELD_NUMBER: _ClassVar[int]
    expired_leases: int
    expired_blocks: int
    orphan_blocks: int
    orphan_bytes: int
    dead_bytes: int
    reclaimed_bytes: int
    def __init__(self, expired_leases: _Optional[int] = ..., expired_blocks: _Optional[int] = ..., orphan_blocks: _Optional[int] = ..., orphan_bytes: _Optional[int] = ..., dead_bytes: _Optional[int] = ..., reclaimed_bytes: _Optional[int] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("tier", "cursor", "max_bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: str
    cursor: str
    max_bytes: int
    def __init__(self, tier: _Optional[str] = ..., cursor: _Optional[str] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("checked", "checked_bytes", "corrupt", "corrupt_count", "cursor")
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    CHECKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_COUNT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    checked: int
    checked_bytes: int
    corrupt: _containers.RepeatedScalarFieldContainer[bytes]
    corrupt_count: int
    cursor: str
    def __init__(self, checked: _Optional[int] = ..., checked_bytes: _Optional[int] = ..., corrupt: _Optional[_Iterable[bytes]] = ..., corrupt_count: _Optional[int] = ..., cursor: _Optional[str] = ...) -> None: ...

class TiersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TiersResponse(_message.Message):
    __slots__ = ("tiers",)
    TIERS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierReport]
    def __init__(self, tiers: _Optional[_Iterable[_Union[TierReport, _Mapping]]] = ...) -> None: ...

class TierReport(_message.Message):
    __slots__ = ("name", "state", "reason", "capacity_bytes", "used_bytes", "objects", "max_objects", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    MAX_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    reason: str
    capacity_bytes: int
    used_bytes: int
    objects: int
    max_objects: int
    counters: _containers.ScalarMap[str, int]
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., objects: _Optional[int] = ..., max_objects: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("cancel", "bytes_per_s")
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    cancel: bool
    bytes_per_s: int
    def __init__(self, cancel: _Optional[bool] = ..., bytes_per_s: _Optional[int] = ...) -> None: ...

class BalanceRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BalanceResponse(_message.Message):
    __slots__ = ("state", "settled", "rounds", "blocks", "block_bytes", "safe_blocks", "safe_bytes", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAFE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAFE_BYTES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    state: str
    settled: bool
    rounds: int
    blocks: int
    block_bytes: int
    safe_blocks: int
    safe_bytes: int
    counters: _containers.ScalarMap[str, int]
    def __init__(self, state: _Optional[str] = ..., settled: _Optional[bool] = ..., rounds: _Optional[int] = ..., blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., safe_blocks: _Optional[int] = ..., safe_bytes: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...
