"""Whose KV a request works on."""

from dataclasses import dataclass, field

from kvpool.errors import ConfigError

MAX_SALT_BYTES = 64
MAX_TENANT_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """`salt`, a secret of the tenant (b"": none), keeps its blocks apart; their bytes count against `tenant`. Raises `ConfigError`."""

    salt: bytes = field(default=b"", repr=False)
    tenant: str = ""

    def __post_init__(self) -> None:
        if len(self.salt) > MAX_SALT_BYTES or len(self.tenant) > MAX_TENANT_CHARS:
            raise ConfigError(f"a salt has at most {MAX_SALT_BYTES} bytes and a tenant's name at most {MAX_TENANT_CHARS} characters")


EVERYBODY = Scope()
"""No tenants: one machine."""
