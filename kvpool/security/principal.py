"""Who asks, and what they may."""

import re
from dataclasses import dataclass
from enum import StrEnum

from kvpool.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:-]{0,127}\Z")


class Right(StrEnum):
    """What a principal may do.

    `read` and `write` blocks; `map`: get offers of shared memory, UCX and TCP, which open a node's whole memory; `worker`: part of the
    deployment, may speak for any tenant; `admin`: the operator's calls.
    """

    READ = "read"
    WRITE = "write"
    MAP = "map"
    WORKER = "worker"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Somebody known: `name` for logs; `tenant` whose blocks it works on, None for nobody's in particular. Raises `ConfigError`.

    `map` and `worker` see through tenants, so a principal that has one of them can't be bound to a tenant.
    """

    name: str
    tenant: str | None = None
    rights: frozenset[Right] = frozenset()

    def __post_init__(self) -> None:
        check_name("a principal's name", self.name)
        if self.tenant is not None:
            check_name("a tenant's name", self.tenant)
            if loose := sorted(self.rights & {Right.MAP, Right.WORKER, Right.ADMIN}):
                raise ConfigError(f"the right {loose[0]!r} sees through tenants: give it without --tenant, or leave it out")

    def may(self, *rights: Right) -> bool:
        """Whether it has any of `rights`; anybody may what takes none."""
        return not rights or not self.rights.isdisjoint(rights)


def check_name(what: str, name: object) -> str:
    """`name` if it can stand in files, logs and paths without doing harm. Raises `ConfigError`."""
    if not isinstance(name, str) or not _NAME.match(name):
        raise ConfigError(
            f"{what} must be 1 to 128 letters, digits and . _ @ : - and begin with a letter or digit, got {str(name)[:140]!r}"
        )
    return name


def parse_rights(names: object) -> frozenset[Right]:
    """From names; raises `ConfigError`."""
    try:
        return frozenset(map(Right, names))  # type: ignore[call-overload]
    except (ValueError, TypeError):
        raise ConfigError(f"rights are {', '.join(Right)}; got {names!r}") from None


ANYBODY = Principal(name="anybody", rights=frozenset(Right))
"""The caller where nobody is asked who they are: a cluster of one machine."""
