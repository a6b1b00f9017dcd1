"""What each tenant may, in a small JSON file that outlives restarts: `{"version": 1, "tenants": {"name": {"max_bytes": ...}}}`.

Read again when it changes; changed as a whole. Names are those of `check_name`, or "" for what is written without a tenant.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError
from kvpool.policy.rates import NO_LIMITS, TenantLimits
from kvpool.security.files import locked, write_private
from kvpool.security.principal import check_name
from kvpool.security.watched import Watched

MAX_ROWS = 65_536


class TenantBook:
    """The limits in the file at `path`, which is made if need be. Raises `ConfigError`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with locked(path):
            if not path.exists():
                _write(path, {})
        self._watched = Watched(_parse, path)

    def limits(self, tenant: str) -> TenantLimits:
        """What `tenant` may; no limits when nothing is said."""
        return self._watched.value().get(tenant, NO_LIMITS)

    def all(self) -> dict[str, TenantLimits]:
        """Everybody something is said about."""
        return dict(self._watched.value())

    def change(self, tenant: str, **changes: float) -> TenantLimits:
        """Change some of a tenant's limits, durably; what they are now. Raises `ConfigError`."""
        _check(tenant)
        with locked(self._path):
            book = _parse(self._path.read_bytes())
            now = replace(book.get(tenant, NO_LIMITS), **changes)  # type: ignore[arg-type]
            book.pop(tenant, None)
            if now != NO_LIMITS:
                book[tenant] = now
            if len(book) > MAX_ROWS:
                raise ConfigError(f"limits are kept for {MAX_ROWS} tenants at most; remove some")
            _write(self._path, book)
        return now


def _write(path: Path, book: dict[str, TenantLimits]) -> None:
    rows = {name: {field: value for field, value in asdict(book[name]).items() if value} for name in sorted(book)}
    write_private(path, json.dumps({"version": 1, "tenants": rows}, indent=1).encode() + b"\n")


def _parse(content: bytes) -> dict[str, TenantLimits]:
    try:
        read: Any = json.loads(content)
        if read["version"] != 1 or len(read["tenants"]) > MAX_ROWS:
            raise ConfigError("another version, or too many tenants")
        return {_check(name): TenantLimits(**fields) for name, fields in read["tenants"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"not a file of tenants' limits ({type(error).__name__}); `kvpool quota TENANT --set SIZE` makes one") from None


def _check(tenant: str) -> str:
    return check_name("a tenant's name", tenant) if tenant else tenant
