"""The ledger refuses to be overdrawn."""

import pytest

from kvpool.pool import InvariantError
from kvpool.pool.ledger import Ledger


def accounts(ledger: Ledger) -> tuple[int, int, int]:
    return ledger.free_bytes, ledger.used_bytes, ledger.pinned_bytes


def test_ledger_life_of_bytes_balances() -> None:
    """Each step moves bytes between two accounts and the sum stays."""
    ledger = Ledger(100)
    steps = [(ledger.reserve, 60), (ledger.unpin, 40), (ledger.pin, 30), (ledger.free_pinned, 50), (ledger.free_used, 10)]
    seen = []
    for step, size in steps:
        step(size)
        seen.append(accounts(ledger))
        assert sum(seen[-1]) == 100
    assert seen == [(40, 0, 60), (40, 40, 20), (40, 10, 50), (90, 10, 0), (100, 0, 0)]


@pytest.mark.parametrize("name", ["reserve", "pin", "unpin", "free_used", "free_pinned"])
def test_ledger_overdrawn_account_raises_at_once(name: str) -> None:
    """A wrong sum is found where it arises, not hours later."""
    ledger = Ledger(100)
    with pytest.raises(InvariantError, match="overdrawn"):
        getattr(ledger, name)(101)
