"""With what a process proves who it is and whom it believes: certificates for the connection, a bearer token for the caller.

Theory. A certificate says *which machine*, a token says *who asks*. TLS is on when there is a certificate to show (servers) or an authority
to trust (clients); with `mutual` a server also wants a certificate of its clients. Tokens are looked at by `auth.py`. Nothing here is on by
default: `PLAIN` is what one machine needs.

A token never crosses a network in the clear: a client that has one but no TLS refuses to dial anything but loopback, and a server that
looks at tokens refuses to listen anywhere else without a certificate.

Rotation. A server looks at its files at every handshake. A client reads them when it opens a connection; gRPC has no way to change
those of an open one.
"""

import ipaddress
import json
import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import grpc

from kvpool.errors import ConfigError
from kvpool.security.watched import Watched

TOKEN_HEADER = "authorization"
_ENVIRONMENT = "KVPOOL_"
_MIN_TOKEN_CHARS, _MAX_TOKEN_CHARS = 32, 512


@dataclass(frozen=True, kw_only=True)
class Security:
    """One process's credentials, all of them paths, so that no log and no repr can show a secret.

    `tls_cert` and `tls_key` (PEM) are shown by servers, and by clients to servers that ask. `tls_ca` (PEM) is who is trusted to have signed
    the other side's. `tls_name` is the name to expect in a server's certificate instead of the dialled host. Raises `ConfigError`.
    """

    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    tls_name: str = ""
    mutual: bool = False
    token_file: Path | None = None
    _token: Watched[str] | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("a certificate and its key belong together: give both --tls-cert and --tls-key")
        if self.mutual and (self.tls_ca is None or self.tls_cert is None):
            raise ConfigError("--mtls asks clients for a certificate: give --tls-ca (who signs theirs) and --tls-cert and --tls-key")
        if self.tls_cert is not None and self.tls_key is not None:
            check_pair(self.tls_cert, self.tls_key)
        if self.token_file is not None:
            object.__setattr__(self, "_token", Watched(_parse_token, self.token_file))

    @classmethod
    def load(cls, path: Path) -> Self:
        """From a JSON object with the names of the fields; paths in it are relative to it. Raises `ConfigError`."""
        try:
            given: Any = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} can't be used: {error}; it must be a JSON object with {', '.join(_NAMES)}") from None
        if not isinstance(given, dict) or not given.keys() <= set(_NAMES):
            raise ConfigError(f"{path} must be a JSON object with only {', '.join(_NAMES)}")
        return cls.of({name: path.parent / value if name in _PATHS else value for name, value in given.items()})

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """From KVPOOL_TLS_CERT, KVPOOL_TLS_KEY, KVPOOL_TLS_CA, KVPOOL_TLS_NAME, KVPOOL_MUTUAL, KVPOOL_TOKEN_FILE."""
        found = os.environ if environment is None else environment
        given = {name: found[_ENVIRONMENT + name.upper()] for name in _NAMES if found.get(_ENVIRONMENT + name.upper())}
        return cls.of({**given, "mutual": given.get("mutual", "").lower() in ("1", "true", "yes")})

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """From named values, paths as text or paths; what isn't a field is not looked at."""
        given: dict[str, Any] = {name: values[name] for name in _NAMES if values.get(name)}
        return cls(**given | {name: Path(value) for name, value in given.items() if name in _PATHS})

    @property
    def dials_tls(self) -> bool:
        """Whether connections are opened with TLS."""
        return self.tls_ca is not None or self.tls_cert is not None

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """For a listening port; None without a certificate. The files are looked at again at every handshake."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        paths = [path for path in (self.tls_cert, self.tls_key, self.tls_ca) if path is not None]
        watched = Watched(self._configuration, *paths)
        return grpc.dynamic_ssl_server_credentials(watched.value(), _changes(watched), require_client_authentication=self.mutual)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """For a connection; None without TLS. Without `tls_ca` the system's authorities are trusted."""
        if not self.dials_tls:
            return None
        ca, key, cert = (None if path is None else read_file(path) for path in (self.tls_ca, self.tls_key, self.tls_cert))
        return grpc.ssl_channel_credentials(ca, key, cert)

    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """Options of a connection that follow from this."""
        return (("grpc.ssl_target_name_override", self.tls_name),) if self.tls_name and self.dials_tls else ()

    def metadata(self, address: str) -> tuple[tuple[str, str], ...]:
        """What every call to `address` (host:port) carries. Raises `ConfigError` rather than send a token in the clear."""
        if self._token is None:
            return ()
        if not self.dials_tls and not is_loopback(address):
            raise ConfigError(f"a token would cross the network to {address} in the clear; use TLS (--tls-ca)")
        return ((TOKEN_HEADER, f"Bearer {self._token.value()}"),)

    def bearer(self) -> str | None:
        """The token itself, for HTTP."""
        return None if self._token is None else self._token.value()

    def _configuration(self, cert: bytes, key: bytes, ca: bytes | None = None) -> Any:
        assert self.tls_cert is not None
        assert self.tls_key is not None
        check_pair(self.tls_cert, self.tls_key)
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca if self.mutual else None)


PLAIN = Security()
"""No TLS, no token: one machine."""

_NAMES = tuple(one.name for one in fields(Security) if one.init)
_PATHS = ("tls_cert", "tls_key", "tls_ca", "token_file")


def is_loopback(address: str) -> bool:
    """Whether `address` (host:port, or a host) can only be this machine."""
    host = address.rpartition(":")[0] or address
    host = host.removeprefix("[").removesuffix("]")
    if host == "localhost" or address.startswith("unix:"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_pair(cert: Path, key: Path) -> None:
    """Raise `ConfigError` unless the PEM files are a certificate and its own key."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=_no_password)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{cert} and {key} can't be used as a certificate and its key: {error}") from None


def read_file(path: Path) -> bytes:
    """The bytes of a credential. Raises `ConfigError`."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None


def _changes(watched: Watched[Any]) -> Callable[[], Any]:
    """What gRPC calls at every handshake: a new configuration, or None to go on with the last one."""
    last = watched.value()

    def fetch() -> Any:
        nonlocal last
        now = watched.value()
        if now is last:
            return None
        last = now
        return now

    return fetch


def _no_password() -> str:
    raise ConfigError("the key is locked with a password; give one that is not")


def _parse_token(content: bytes) -> str:
    try:
        token = content.decode("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    if not _MIN_TOKEN_CHARS <= len(token) <= _MAX_TOKEN_CHARS or not token.isprintable() or " " in token:
        raise ConfigError("the token file must hold one token, as `kvpool token new` prints it")
    return token
