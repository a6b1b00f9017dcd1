"""A tenant's salt: what keeps equal prompts of two tenants under different keys.

It is computed where the tenant is known for sure (router, node), from a secret of the cluster; a client can neither choose nor compute
another's. A caller may ask for a finer separation (`cache_salt`): that is mixed *into* the tenant's salt, so it can only narrow.
"""

import hashlib
import hmac
from pathlib import Path

from kvpool.errors import ConfigError
from kvpool.security.principal import check_name
from kvpool.security.watched import Watched

MIN_SECRET_BYTES = 32
_TENANT = b"kvpool/tenant-salt/v1\0"
_NARROW = b"kvpool/cache-salt/v1\0"


class Salts:
    """Salts from the cluster's secret in the file at `path`: at least 32 bytes, the same on every router and node. Raises `ConfigError`."""

    def __init__(self, path: Path) -> None:
        self._secret = Watched(_parse, path).value()  # another secret would orphan every block: only a restart takes one

    def of(self, tenant: str | None) -> bytes:
        """The salt of `tenant`, 32 bytes; of nobody in particular (None) the empty one."""
        return b"" if tenant is None else tenant_salt(self._secret, tenant)


def tenant_salt(secret: bytes, tenant: str) -> bytes:
    """HMAC-SHA256 of a tenant's name by the cluster's secret."""
    return hmac.digest(secret, _TENANT + check_name("a tenant's name", tenant).encode(), hashlib.sha256)


def narrowed(salt: bytes, wish: bytes) -> bytes:
    """`salt` with a caller's own `wish` mixed in; without a wish it stays as it is."""
    return hmac.digest(salt, _NARROW + wish, hashlib.sha256) if wish else salt


def _parse(content: bytes) -> bytes:
    secret = content.strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"a cluster secret needs at least {MIN_SECRET_BYTES} bytes; make one with `openssl rand -hex 32`")
    return secret
