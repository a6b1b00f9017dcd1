from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class HandoverRequest(_message.Message):
    __slots__ = ("node_id", "incarnation")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class HandoverResponse(_message.Message):
    __slots__ = ("done", "left")
    DONE_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    done: bool
    left: int
    def __init__(self, done: _Optional[bool] = ..., left: _Optional[int] = ...) -> None: ...

class HeadsRequest(_message.Message):
    __slots__ = ("keys", "extent_tokens")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    EXTENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    extent_tokens: int
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., extent_tokens: _Optional[int] = ...) -> None: ...

class HeadsResponse(_message.Message):
    __slots__ = ("heads",)
    HEADS_FIELD_NUMBER: _ClassVar[int]
    heads: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, heads: _Optional[_Iterable[bytes]] = ...) -> None: ...
