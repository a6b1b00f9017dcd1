"""What a server process asks of its callers, in one object: its certificate, its tables of tokens and tenants, its audit log.

`OPEN` asks nothing, which is what one machine needs: everything here is off until a flag says so. `flags.py` has the flags.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc.aio

from kvpool.clock import Clock, MonotonicClock
from kvpool.errors import ConfigError
from kvpool.policy.rates import NO_LIMITS, Rates, TenantLimits
from kvpool.security.audit import AuditLog
from kvpool.security.salt import Salts
from kvpool.security.tenants import TenantBook
from kvpool.security.tokens import TokenTable
from kvpool.wire.auth import Gate
from kvpool.wire.channel import bind, make_server
from kvpool.wire.credentials import PLAIN, Security, is_loopback


@dataclass(frozen=True, kw_only=True)
class Guard:
    """`tokens` None: nobody is asked who they are. `book`: what tenants may. `salts`: needed to serve tenants. Raises `ConfigError`."""

    security: Security = PLAIN
    tokens: TokenTable | None = None
    book: TenantBook | None = None
    salts: Salts | None = None
    audit: AuditLog | None = None

    @classmethod
    def open(cls, flags: Mapping[str, Any], *, default_book: Path | None = None) -> Self:
        """From the values of `credential_options` and `guard_options`. `default_book`: where limits are kept unless told otherwise."""
        tokens, secret, audit = (flags.get(name) for name in ("tokens", "cluster_secret", "audit_log"))
        book = flags.get("tenants") or default_book
        return cls(
            security=Security.of(flags),
            tokens=None if tokens is None else TokenTable(tokens),
            book=None if book is None else TenantBook(book),
            salts=None if secret is None else Salts(secret),
            audit=None if audit is None else AuditLog(audit),
        )

    def limits(self, tenant: str) -> TenantLimits:
        """What `tenant` may."""
        return NO_LIMITS if self.book is None else self.book.limits(tenant)

    def salt_of(self, tenant: str | None) -> bytes:
        """The salt of a tenant; b"" for None. Raises `ConfigError` when there is no secret to make one from."""
        if tenant is None:
            return b""
        if self.salts is None:
            raise ConfigError("tenants are kept apart by salts, and these are made from a secret: start this server with --cluster-secret")
        return self.salts.of(tenant)

    def server(self, rates: Rates | None = None, clock: Clock | None = None) -> grpc.aio.Server:
        """A gRPC server behind the gate."""
        if self.tokens is None and self.audit is None:
            return make_server()
        return make_server([Gate(clock=clock or MonotonicClock(), tokens=self.tokens, rates=rates, audit=self.audit)])

    def bind(self, server: grpc.aio.Server, listen: str) -> str:
        """Let `server` listen; the address that others can dial. Tokens aren't taken in the clear but on loopback."""
        self.check_listen(listen)
        return bind(server, listen, self.security)

    def check_listen(self, listen: str) -> None:
        """Raise `ConfigError` when tokens would come in over a network in the clear."""
        if self.tokens is not None and self.security.tls_cert is None and not is_loopback(listen):
            raise ConfigError(f"tokens would cross the network to {listen} in the clear: give --tls-cert, or listen on loopback")


OPEN = Guard()
