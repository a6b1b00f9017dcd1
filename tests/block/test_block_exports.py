"""The room's public names."""

import kvpool.block


def test_all_is_sorted_and_resolves() -> None:
    """Readers find every public name in one sorted list, and none of them is missing."""
    names = kvpool.block.__all__
    assert list(names) == sorted(names, key=lambda name: (not name.isupper(), name))
    assert all(hasattr(kvpool.block, name) for name in names)
