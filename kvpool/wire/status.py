"""kvpool errors as gRPC status codes, and back. The message travels as the status details."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio

from kvpool.errors import (
    AccessError,
    ClosedError,
    ConfigError,
    DeadlineError,
    KvpoolError,
    LimitError,
    LocalError,
    ProtocolError,
    UnavailableError,
)

_CODES: tuple[tuple[type[KvpoolError], grpc.StatusCode], ...] = (
    (ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (ClosedError, grpc.StatusCode.UNAVAILABLE),
    (LocalError, grpc.StatusCode.FAILED_PRECONDITION),
    (DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (AccessError, grpc.StatusCode.PERMISSION_DENIED),
    (LimitError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (KvpoolError, grpc.StatusCode.INTERNAL),
)

_ERRORS: dict[grpc.StatusCode, Callable[[str], KvpoolError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: ConfigError,
    grpc.StatusCode.FAILED_PRECONDITION: LocalError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.UNAUTHENTICATED: AccessError,
    grpc.StatusCode.PERMISSION_DENIED: AccessError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitError,
    grpc.StatusCode.UNIMPLEMENTED: ProtocolError,
    grpc.StatusCode.INTERNAL: ProtocolError,
    grpc.StatusCode.UNKNOWN: ProtocolError,
}

_HANDSHAKES = (
    ("WRONG_VERSION_NUMBER", "the server does not speak TLS; connect without --tls-ca and --tls-cert, or give the server a certificate"),
    ("CERTIFICATE_VERIFY_FAILED", "the server's certificate is not trusted; is it signed by --tls-ca, in date, and for this host?"),
    ("BAD_SIGNATURE", "the server's certificate is not trusted; another authority than --tls-ca signed it"),
    ("Hostname Verification", "the server's certificate is for another name; give --tls-name"),
    ("No match found for server name", "the server's certificate is for another name; give --tls-name"),
    (
        "Socket closed",
        "closed in the handshake; does the server speak TLS (give --tls-ca), or want a certificate that it trusts (--tls-cert)?",
    ),
)
"""What gRPC says when a connection can't be opened, and what to do about it."""


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
    return kind(f"{peer}: {_advice(details)}{details or code.name.lower()}")


@contextmanager
def told(peer: str) -> Iterator[None]:
    """Around a client's call to `peer`: gRPC's errors as ours. A connection that is closed before or during the call is an
    unavailable peer, and no cancellation of who called."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_of(error, peer) from error
    except grpc.aio.UsageError as error:
        raise UnavailableError(f"{peer}: the connection was closed before the call") from error
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if caller is None or caller.cancelling():
            raise
        raise UnavailableError(f"{peer}: the connection was closed during the call") from None


async def next_message(call: Any, peer: str, patience_s: float, what: str) -> Any:
    """The next message of a stream from `peer`, or `grpc.aio.EOF` at its end. `what` names what is waited for.

    `DeadlineError` when nothing comes for `patience_s`; other errors as `told` has them.
    """
    limit = asyncio.timeout(patience_s)
    try:
        async with limit:
            with told(peer):
                return await call.read()
    except TimeoutError as error:
        if limit.expired():
            raise DeadlineError(f"{peer}: no {what} for {patience_s:g} s") from error
        raise


def _advice(details: str) -> str:
    """What a failed handshake means, in front of gRPC's own words."""
    if not details.startswith("failed to connect"):
        return ""
    return next((f"{advice} - " for sign, advice in _HANDSHAKES if sign in details), "")
