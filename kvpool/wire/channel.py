"""How all our gRPC channels and servers are made: common options, and TLS where `Security` says so."""

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from kvpool.errors import ConfigError
from kvpool.units import MIB
from kvpool.wire.credentials import PLAIN, Security

MESSAGE_BYTES = 32 * MIB
"""Largest control message; data travels in chunks of `CHUNK_BYTES`."""

CHUNK_BYTES = MIB

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    # A dead peer is noticed by pings even when no call is in flight; a reconnect is tried quickly after a restart.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # in spite of its name: how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", 10_000),  # strangers hold a connection for no longer
)


def open_channel(address: str, security: Security = PLAIN) -> Any:
    """A connection to `address` (host:port) for an event loop."""
    credentials, options = security.channel_credentials(), (*OPTIONS, *security.channel_options())
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def open_blocking_channel(address: str, security: Security = PLAIN) -> Any:
    """The same for threads."""
    credentials, options = security.channel_credentials(), (*OPTIONS, *security.channel_options())
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def make_server(interceptors: Sequence[grpc.aio.ServerInterceptor] = ()) -> grpc.aio.Server:
    """A server whose calls pass `interceptors` first."""
    return grpc.aio.server(options=SERVER_OPTIONS, interceptors=tuple(interceptors))


def bind(server: grpc.aio.Server, listen: str, security: Security = PLAIN) -> str:
    """Bind `server` to `listen` (host:port, port 0: any free one); the address that others can dial."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"not an address: {listen!r}; give host:port, for example 127.0.0.1:0")
    credentials = security.server_credentials()
    try:
        bound = server.add_insecure_port(listen) if credentials is None else server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise ConfigError(f"can't listen at {listen}: {error}; choose another port, or 0 for any free one") from error
    return f"{host}:{bound}"
