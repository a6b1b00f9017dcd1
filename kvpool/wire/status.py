"""kvpool errors as gRPC status codes, and back. The message travels as the status details."""

from collections.abc import Callable

import grpc

from kvpool.errors import ClosedError, ConfigError, DeadlineError, KvpoolError, LocalError, ProtocolError, UnavailableError

_CODES: tuple[tuple[type[KvpoolError], grpc.StatusCode], ...] = (
    (ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (ClosedError, grpc.StatusCode.UNAVAILABLE),
    (LocalError, grpc.StatusCode.FAILED_PRECONDITION),
    (DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (KvpoolError, grpc.StatusCode.INTERNAL),
)

_ERRORS: dict[grpc.StatusCode, Callable[[str], KvpoolError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: ConfigError,
    grpc.StatusCode.FAILED_PRECONDITION: LocalError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.UNIMPLEMENTED: ProtocolError,
    grpc.StatusCode.INTERNAL: ProtocolError,
    grpc.StatusCode.UNKNOWN: ProtocolError,
}


def code_of(error: KvpoolError) -> grpc.StatusCode:
    """The status a server answers with when a handler raises `error`."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    raise AssertionError("unreachable: KvpoolError is the last row")


def error_of(error: grpc.RpcError, peer: str) -> KvpoolError:
    """The exception a client raises for a failed call to `peer` (an address). Unlisted codes mean the peer is unavailable."""
    code, details = error.code(), error.details() or ""
    kind = _ERRORS.get(code, UnavailableError)
    return kind(f"{peer}: {details or code.name.lower()}")
