"""Which prefixes several host pools can serve together."""

import pytest

from kvpool.connectors.sglang.hits import leading, servable
from kvpool.errors import ConfigError


@pytest.mark.parametrize(("present", "count"), [([], 0), ([False, True], 0), ([True, True, False, True], 2), ([True] * 3, 3)])
def test_leading_counts_up_to_the_first_hole(present: list[bool], count: int) -> None:
    """Pages behind a hole can't be used."""
    assert leading(present) == count


@pytest.mark.parametrize(
    ("present", "trailing", "lengths"),
    [
        ("1111", 1, [1, 2, 3, 4]),
        ("0101", 1, [2, 4]),
        ("0110", 2, [3]),
        ("1101", 2, [1, 2]),
        ("0001", 0, [4]),
        ("0000", 1, []),
    ],
)
def test_trailing_pages_may_serve_longer_prefixes_only(present: str, trailing: int, lengths: list[int]) -> None:
    """A state at the end is enough; a window at the very beginning is as long as the prefix."""
    assert servable("trailing_pages", [bit == "1" for bit in present], trailing) == lengths


def test_all_pages_end_at_the_first_hole() -> None:
    """Every token needs its page."""
    assert servable("all_pages", [True, True, False, True], 1) == [1, 2]


def test_unknown_policy_raises() -> None:
    """To guess what a pool needs would load half of it."""
    with pytest.raises(ConfigError, match="block_groups"):
        servable("block_groups", [True], 1)
