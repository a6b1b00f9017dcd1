"""Who this command is to the servers it asks: the flags of `kvpool` itself, or the environment."""

import ssl
from typing import TYPE_CHECKING

import click

from kvpool.errors import ConfigError

if TYPE_CHECKING:
    from kvpool.wire.credentials import Security


def security() -> "Security":
    """The credentials given before the command's name (`kvpool --tls-ca FILE nodes`), on its thread; elsewhere those of the environment."""
    from kvpool.wire.credentials import Security

    context = click.get_current_context(silent=True)
    flags = None if context is None else context.find_root().obj
    return Security.of(flags) if isinstance(flags, dict) else Security.from_environment()


def https_context(found: "Security") -> ssl.SSLContext:
    """For a router that speaks HTTPS. Raises `ConfigError`."""
    try:
        context = ssl.create_default_context(cafile=found.tls_ca)
        if found.tls_cert is not None:
            context.load_cert_chain(found.tls_cert, found.tls_key)
    except OSError as error:
        raise ConfigError(f"the certificates can't be used: {error}") from None
    return context
