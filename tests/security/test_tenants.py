"""Limits per tenant: kept over restarts, changed as a whole."""

from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from kvpool.policy.rates import NO_LIMITS, TenantLimits
from kvpool.security.tenants import TenantBook


def test_limits_outlive_the_process_that_set_them(tmp_path: Path) -> None:
    """A restart must not lift a quota."""
    book = TenantBook(tmp_path / "tenants.json")
    book.change("acme", max_bytes=1000)
    book.change("acme", requests_per_s=5.0)
    again = TenantBook(tmp_path / "tenants.json")
    assert again.limits("acme") == TenantLimits(max_bytes=1000, requests_per_s=5.0)
    assert again.limits("other") == NO_LIMITS
    assert (tmp_path / "tenants.json").stat().st_mode & 0o777 == 0o600


def test_change_by_one_process_is_seen_by_another(tmp_path: Path) -> None:
    """Routers and nodes may share the file."""
    one, two = TenantBook(tmp_path / "t.json"), TenantBook(tmp_path / "t.json")
    one.change("acme", bytes_per_s=7.0)
    assert two.limits("acme").bytes_per_s == 7.0
    two.change("acme", bytes_per_s=0.0)
    assert one.all() == {}


@pytest.mark.parametrize(
    "changes", [{"max_bytes": -1}, {"requests_per_s": float("nan")}, {"bytes_per_s": float("inf")}, {"max_bytes": 1 << 63}]
)
def test_senseless_limits_are_refused(tmp_path: Path, changes: dict[str, float]) -> None:
    """And nothing is written."""
    book = TenantBook(tmp_path / "t.json")
    with pytest.raises(ConfigError):
        book.change("acme", **changes)
    assert book.all() == {}


def test_damaged_file_is_refused_at_the_start_and_left_alone(tmp_path: Path) -> None:
    """Starting without limits because of a typo would be a silent way around them."""
    path = tmp_path / "t.json"
    path.write_text("nonsense")
    with pytest.raises(ConfigError, match="limits"):
        TenantBook(path)
    assert path.read_text() == "nonsense"
