"""TLS for plain sockets: the contexts of the data plane, with the certificates of the control plane.

Only TLS 1.3: both ends are ours.
"""

import ssl
from collections.abc import Callable
from pathlib import Path

from kvpool.errors import ConfigError
from kvpool.security.watched import Watched


def server_context(cert: Path, key: Path, ca: Path | None, *, mutual: bool) -> Callable[[], ssl.SSLContext]:
    """What gives the context of the next handshake: the files are looked at again when they change.

    With `mutual` clients must show a certificate that `ca` has signed. Raises `ConfigError`.
    """

    def make(*contents: bytes) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # connections last; none is resumed
        _load(context, cert, key, ca if mutual else None)
        if mutual:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    return Watched(make, *(path for path in (cert, key, ca) if path is not None)).value


def client_context(ca: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext:
    """What opens connections to servers that `ca` has signed (None: the system's authorities). Raises `ConfigError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if ca is None:
        context.load_default_certs()
    _load(context, cert, key, ca)
    return context


def _load(context: ssl.SSLContext, cert: Path | None, key: Path | None, ca: Path | None) -> None:
    try:
        if cert is not None:
            context.load_cert_chain(cert, key, password=_no_password)
        if ca is not None:
            context.load_verify_locations(ca)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"the certificates {', '.join(str(path) for path in (cert, key, ca) if path)} can't be used: {error}") from None


def _no_password() -> str:
    raise ConfigError("the key is locked with a password; give one that is not")
