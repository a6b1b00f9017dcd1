from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchRequest(_message.Message):
    __slots__ = ("incarnation", "sequence")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    sequence: int
    def __init__(self, incarnation: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class EventBatch(_message.Message):
    __slots__ = ("incarnation", "after", "sequence", "keys", "parents", "depths", "tiers", "removed", "part", "last", "pressure")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    DEPTHS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    after: int
    sequence: int
    keys: bytes
    parents: bytes
    depths: _containers.RepeatedScalarFieldContainer[int]
    tiers: bytes
    removed: bytes
    part: int
    last: bool
    pressure: Pressure
    def __init__(self, incarnation: _Optional[int] = ..., after: _Optional[int] = ..., sequence: _Optional[int] = ..., keys: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., depths: _Optional[_Iterable[int]] = ..., tiers: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., part: _Optional[int] = ..., last: _Optional[bool] = ..., pressure: _Optional[_Union[Pressure, _Mapping]] = ...) -> None: ...

class Pressure(_message.Message):
    __slots__ = ("free", "price")
    FREE_FIELD_NUMBER: _ClassVar[int]
    PRICE_FIELD_NUMBER: _ClassVar[int]
    free: int
    price: float
    def __init__(self, free: _Optional[int] = ..., price: _Optional[float] = ...) -> None: ...
