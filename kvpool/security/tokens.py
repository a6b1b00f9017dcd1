"""Bearer tokens: 256 random bits each, of which only the SHA-256 is kept.

The table is a JSON file, read again when it changes, so that a token that is revoked is refused at the next call. A random token needs no
slow hash: there is nothing to guess. Comparison takes the same time wherever two digests differ.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpool.errors import AccessError, ConfigError
from kvpool.security.files import locked, write_private
from kvpool.security.principal import Principal, Right, parse_rights
from kvpool.security.watched import Watched

PREFIX = "kvp_"
TOKEN_BYTES = 32
MAX_TOKENS = 65_536
_MAX_CHARS = 512
_INDEX_CHARS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """A token as it is kept. `id`: eight hex digits to name it by; `digest`: SHA-256 of the token in hex; `created_s`: unix time."""

    id: str
    digest: str
    name: str
    tenant: str | None
    rights: tuple[str, ...]
    created_s: int

    def principal(self) -> Principal:
        """Whom it stands for."""
        return Principal(name=self.name, tenant=self.tenant, rights=parse_rights(self.rights))


class TokenTable:
    """The tokens in the file at `path`. Raises `ConfigError` when it can't be used at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._watched = Watched(_parse, path)

    def principal(self, token: str) -> Principal:
        """Whom `token` stands for. Raises `AccessError`, which never quotes it."""
        if 0 < len(token) <= _MAX_CHARS:
            digest = digest_of(token)
            for row, principal in self._watched.value().get(digest[:_INDEX_CHARS], ()):
                if hmac.compare_digest(row.digest, digest):
                    return principal
        raise AccessError("the token is not known here, or was revoked; make one with `kvpool token new`")


def digest_of(token: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def new_token(path: Path, *, name: str, tenant: str | None, rights: Sequence[str], now_s: int) -> tuple[TokenRow, str]:
    """Make a token and keep its digest at `path`, which is made if need be; the row and the token. Raises `ConfigError`."""
    token = PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
    row = TokenRow(
        id=secrets.token_hex(4), digest=digest_of(token), name=name, tenant=tenant, rights=tuple(sorted(set(rights))), created_s=now_s
    )
    if not row.principal().rights:
        raise ConfigError(f"a token without rights is of no use; give some of {', '.join(Right)}")
    with locked(path):
        rows = read_rows(path)
        if any(other.name == name for other in rows):
            raise ConfigError(f"there is a token named {name!r} already; revoke it first, or take another --name")
        if len(rows) >= MAX_TOKENS:
            raise ConfigError(f"the table holds {MAX_TOKENS} tokens, which is its limit; revoke some")
        _write(path, [*rows, row])
    return row, token


def revoke(path: Path, which: str) -> TokenRow:
    """Remove the token with this id or name. Raises `ConfigError`."""
    with locked(path):
        rows = read_rows(path)
        found = [row for row in rows if which in (row.id, row.name)]
        if len(found) != 1:
            raise ConfigError(f"{len(found) or 'no'} tokens have the id or name {which!r}; `kvpool token list` shows them")
        _write(path, [row for row in rows if row is not found[0]])
    return found[0]


def read_rows(path: Path) -> list[TokenRow]:
    """The tokens at `path`, none when there is no such file. Raises `ConfigError`."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    return [row for rows in _parse(content).values() for row, _ in rows]


def _write(path: Path, rows: Sequence[TokenRow]) -> None:
    ordered = sorted(rows, key=lambda row: (row.created_s, row.id))
    write_private(path, json.dumps({"version": 1, "tokens": [asdict(row) for row in ordered]}, indent=1).encode() + b"\n")


def _parse(content: bytes) -> dict[str, list[tuple[TokenRow, Principal]]]:
    """Rows by the start of their digest."""
    try:
        read: Any = json.loads(content)
        if read["version"] != 1 or len(read["tokens"]) > MAX_TOKENS:
            raise ConfigError("another version, or too many tokens")
        rows = [_row(**fields) for fields in read["tokens"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"not a token table ({type(error).__name__}); `kvpool token new` makes one") from None
    index: dict[str, list[tuple[TokenRow, Principal]]] = {}
    for row in rows:
        index.setdefault(row.digest[:_INDEX_CHARS], []).append((row, row.principal()))
    return index


def _row(*, id: str, digest: str, name: str, tenant: str | None, rights: list[str], created_s: int) -> TokenRow:
    if len(bytes.fromhex(digest)) != hashlib.sha256().digest_size or digest != digest.lower():
        raise ValueError
    return TokenRow(id=str(id), digest=digest, name=name, tenant=tenant, rights=tuple(rights), created_s=int(created_s))
