from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("node_id", "incarnation", "capacity_bytes", "free_bytes", "used_bytes", "pinned_bytes", "blocks", "read_leases", "write_leases", "counters", "shm", "ucx", "grpc_data", "tcp")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    READ_LEASES_FIELD_NUMBER: _ClassVar[int]
    WRITE_LEASES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    SHM_FIELD_NUMBER: _ClassVar[int]
    UCX_FIELD_NUMBER: _ClassVar[int]
    GRPC_DATA_FIELD_NUMBER: _ClassVar[int]
    TCP_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    capacity_bytes: int
    free_bytes: int
    used_bytes: int
    pinned_bytes: int
    blocks: int
    read_leases: int
    write_leases: int
    counters: _containers.ScalarMap[str, int]
    shm: ShmOffer
    ucx: UcxOffer
    grpc_data: bool
    tcp: TcpOffer
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., blocks: _Optional[int] = ..., read_leases: _Optional[int] = ..., write_leases: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., shm: _Optional[_Union[ShmOffer, _Mapping]] = ..., ucx: _Optional[_Union[UcxOffer, _Mapping]] = ..., grpc_data: _Optional[bool] = ..., tcp: _Optional[_Union[TcpOffer, _Mapping]] = ...) -> None: ...

class ShmOffer(_message.Message):
    __slots__ = ("path", "boot_id", "session")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    path: str
    boot_id: str
    session: str
    def __init__(self, path: _Optional[str] = ..., boot_id: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class TcpOffer(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class UcxOffer(_message.Message):
    __slots__ = ("worker_address", "rkey", "base_address", "length")
    WORKER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RKEY_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    worker_address: bytes
    rkey: bytes
    base_address: int
    length: int
    def __init__(self, worker_address: _Optional[bytes] = ..., rkey: _Optional[bytes] = ..., base_address: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("present",)
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    present: bytes
    def __init__(self, present: _Optional[bytes] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("owner", "lease_ms", "blocks", "sequence", "tenant", "near")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NEAR_FIELD_NUMBER: _ClassVar[int]
    owner: str
    lease_ms: int
    blocks: _containers.RepeatedCompositeFieldContainer[Reservation]
    sequence: int
    tenant: str
    near: bool
    def __init__(self, owner: _Optional[str] = ..., lease_ms: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[Reservation, _Mapping]]] = ..., sequence: _Optional[int] = ..., tenant: _Optional[str] = ..., near: _Optional[bool] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("key", "parent", "depth", "length", "ttl_ms", "priority", "priority_ms")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_MS_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    parent: bytes
    depth: int
    length: int
    ttl_ms: int
    priority: int
    priority_ms: int
    def __init__(self, key: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., depth: _Optional[int] = ..., length: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., priority: _Optional[int] = ..., priority_ms: _Optional[int] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("lease_id", "grants")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    GRANTS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    grants: _containers.RepeatedCompositeFieldContainer[Grant]
    def __init__(self, lease_id: _Optional[int] = ..., grants: _Optional[_Iterable[_Union[Grant, _Mapping]]] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("outcome", "offset")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        GRANTED: _ClassVar[Grant.Outcome]
        EXISTS: _ClassVar[Grant.Outcome]
        NO_SPACE: _ClassVar[Grant.Outcome]
    GRANTED: Grant.Outcome
    EXISTS: Grant.Outcome
    NO_SPACE: Grant.Outcome
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    outcome: Grant.Outcome
    offset: int
    def __init__(self, outcome: _Optional[_Union[Grant.Outcome, str]] = ..., offset: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("lease_id", "keys")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, lease_id: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("committed",)
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    committed: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, committed: _Optional[_Iterable[bool]] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("owner", "lease_ms", "keys", "sequence", "fetch_from", "detail")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FETCH_FROM_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    owner: str
    lease_ms: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    sequence: int
    fetch_from: _containers.RepeatedScalarFieldContainer[str]
    detail: bool
    def __init__(self, owner: _Optional[str] = ..., lease_ms: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., sequence: _Optional[int] = ..., fetch_from: _Optional[_Iterable[str]] = ..., detail: _Optional[bool] = ...) -> None: ...

class AcquireResponse(_message.Message):
    __slots__ = ("lease_id", "found")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    found: _containers.RepeatedCompositeFieldContainer[Found]
    def __init__(self, lease_id: _Optional[int] = ..., found: _Optional[_Iterable[_Union[Found, _Mapping]]] = ...) -> None: ...

class Found(_message.Message):
    __slots__ = ("hit", "offset", "length", "parent", "depth", "ttl_ms", "sequence", "tenant", "priority", "priority_ms")
    HIT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_MS_FIELD_NUMBER: _ClassVar[int]
    hit: bool
    offset: int
    length: int
    parent: bytes
    depth: int
    ttl_ms: int
    sequence: int
    tenant: str
    priority: int
    priority_ms: int
    def __init__(self, hit: _Optional[bool] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., parent: _Optional[bytes] = ..., depth: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., sequence: _Optional[int] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., priority_ms: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease_id", "lease_ms")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    lease_ms: int
    def __init__(self, lease_id: _Optional[int] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("alive",)
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    alive: bool
    def __init__(self, alive: _Optional[bool] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id", "suspect")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    suspect: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, lease_id: _Optional[int] = ..., suspect: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Range(_message.Message):
    __slots__ = ("offset", "length")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    offset: int
    length: int
    def __init__(self, offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("lease_id", "ranges")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    ranges: _containers.RepeatedCompositeFieldContainer[Range]
    def __init__(self, lease_id: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[Range, _Mapping]]] = ...) -> None: ...

class ReadChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class WriteChunk(_message.Message):
    __slots__ = ("lease_id", "offset", "data")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    offset: int
    data: bytes
    def __init__(self, lease_id: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class WriteResponse(_message.Message):
    __slots__ = ("written",)
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    written: int
    def __init__(self, written: _Optional[int] = ...) -> None: ...
