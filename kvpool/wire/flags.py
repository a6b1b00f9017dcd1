"""The flags of every command about who it is and what it asks of callers; each may come from the environment (KVPOOL_TLS_CERT, ...)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_FILE = click.Path(dir_okay=False, path_type=Path)


def credential_options(function: F) -> F:
    """Whom this process believes and who it is: `Security.of` takes the values."""
    return _with(function, _CREDENTIALS)


def guard_options(function: F) -> F:
    """What a gRPC server asks of its callers, credentials included: `Guard.open` takes the values."""
    return _with(function, (*_CREDENTIALS, *_GUARDS, *_GRPC))


def http_guard_options(function: F) -> F:
    """What an HTTP server asks of its callers."""
    return _with(function, (*_CREDENTIALS, *_GUARDS))


def _option(flag: str, help: str, **more: Any) -> Callable[[Any], Any]:
    name = flag.removeprefix("--").replace("-", "_")
    return click.option(flag, envvar=f"KVPOOL_{name.upper()}", default=None, help=help, **more)


_CREDENTIALS = (
    _option("--tls-cert", "PEM certificate of this process; a server with one speaks TLS only.", type=_FILE),
    _option("--tls-key", "Its PEM key.", type=_FILE),
    _option("--tls-ca", "PEM certificates of who is trusted to sign others'; a client with it speaks TLS only.", type=_FILE),
    _option("--tls-name", "Name to expect in servers' certificates instead of the host dialled."),
    _option("--token-file", "File with the bearer token to show to servers.", type=_FILE),
)
_GUARDS = (
    _option("--tokens", "Table of the tokens to accept, made by `kvpool token`; without it nobody is asked who they are.", type=_FILE),
    _option("--cluster-secret", "File with at least 32 random bytes, from which tenants' salts are made.", type=_FILE),
    _option("--tenants", "File in which tenants' quotas and rates are kept.", type=_FILE),
)
_GRPC = (
    click.option("--mtls", "mutual", is_flag=True, envvar="KVPOOL_MUTUAL", help="Serve only clients with a certificate by --tls-ca."),
    _option("--audit-log", "File to which what operators do is written.", type=_FILE),
)


def _with(function: F, options: tuple[Callable[[Any], Any], ...]) -> F:
    for option in reversed(options):
        function = option(function)
    return function
