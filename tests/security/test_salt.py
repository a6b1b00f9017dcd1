"""Salts: from the secret and the tenant only, narrowed but never replaced by a caller."""

import hashlib
import hmac
from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from kvpool.security.salt import Salts, narrowed, tenant_salt

SECRET = b"s" * 32


def test_salt_is_pinned() -> None:
    """Another formula would orphan every tenant's blocks."""
    expected = hmac.new(SECRET, b"kvpool/tenant-salt/v1\0acme", hashlib.sha256).digest()
    assert tenant_salt(SECRET, "acme") == expected


def test_wish_narrows_and_never_replaces() -> None:
    """Two tenants with one wish stay apart, and an empty wish changes nothing."""
    a, b = tenant_salt(SECRET, "a"), tenant_salt(SECRET, "b")
    assert len({a, b, narrowed(a, b"w"), narrowed(b, b"w"), narrowed(a, b)}) == 5
    assert narrowed(a, b"") == a


def test_short_secret_is_refused(tmp_path: Path) -> None:
    """A guessable secret is none."""
    path = tmp_path / "secret"
    path.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="32 bytes"):
        Salts(path)
    path.write_bytes(SECRET + b"\n")
    assert Salts(path).of("a") == tenant_salt(SECRET, "a")
    assert Salts(path).of(None) == b""
