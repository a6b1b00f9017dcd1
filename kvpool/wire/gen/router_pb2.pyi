from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("workers", "flights")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    FLIGHTS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerLoad]
    flights: _containers.RepeatedCompositeFieldContainer[Flight]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerLoad, _Mapping]]] = ..., flights: _Optional[_Iterable[_Union[Flight, _Mapping]]] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("role", "id", "incarnation", "active", "queued", "backlog_tokens", "decode_tokens")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    role: str
    id: str
    incarnation: int
    active: int
    queued: int
    backlog_tokens: int
    decode_tokens: int
    def __init__(self, role: _Optional[str] = ..., id: _Optional[str] = ..., incarnation: _Optional[int] = ..., active: _Optional[int] = ..., queued: _Optional[int] = ..., backlog_tokens: _Optional[int] = ..., decode_tokens: _Optional[int] = ...) -> None: ...

class Flight(_message.Message):
    __slots__ = ("number", "priority", "first", "tags", "begun", "over", "held")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    number: int
    priority: int
    first: int
    tags: bytes
    begun: bool
    over: bool
    held: int
    def __init__(self, number: _Optional[int] = ..., priority: _Optional[int] = ..., first: _Optional[int] = ..., tags: _Optional[bytes] = ..., begun: _Optional[bool] = ..., over: _Optional[bool] = ..., held: _Optional[int] = ...) -> None: ...
