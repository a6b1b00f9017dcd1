from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class WhoAmIRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WhoAmIResponse(_message.Message):
    __slots__ = ("name", "tenant", "rights", "salt")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RIGHTS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    name: str
    tenant: str
    rights: _containers.RepeatedScalarFieldContainer[str]
    salt: bytes
    def __init__(self, name: _Optional[str] = ..., tenant: _Optional[str] = ..., rights: _Optional[_Iterable[str]] = ..., salt: _Optional[bytes] = ...) -> None: ...

class SetRatesRequest(_message.Message):
    __slots__ = ("tenant", "requests_per_s", "bytes_per_s")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    requests_per_s: float
    bytes_per_s: float
    def __init__(self, tenant: _Optional[str] = ..., requests_per_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class SetRatesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
