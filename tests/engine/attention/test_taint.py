"""What may be published: only KV that is a function of the prefix."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.block import Flags
from kvpool.block.header import check_flags
from kvpool.engine.attention.settings import TECHNIQUES
from kvpool.engine.attention.taint import STORED_AS, TAINTED_KV, Scope, Taint
from kvpool.errors import ConfigError


def test_untouched_sequence_is_publishable_whole() -> None:
    """No technique, no limit."""
    assert Taint().publishable(1000) == 1000
    assert Taint().flags(1000) == Flags.PURE


@given(st.lists(st.integers(0, 100), min_size=1), st.integers(0, 200))
def test_taint_begins_at_the_first_tainted_token_and_never_ends(marks: list[int], tokens: int) -> None:
    """All that is computed on top of an approximation is one."""
    taint = Taint()
    for mark in marks:
        taint = taint.since(mark)
    assert taint.publishable(tokens) == min(tokens, *marks)


def test_block_with_one_tainted_token_is_not_pure() -> None:
    """A block counts whole: 16 tokens of which the last is tainted may not go under the prefix key."""
    taint = Taint().since(31)
    assert taint.flags(16) == Flags.PURE
    assert taint.flags(31) == Flags.PURE
    assert taint.flags(32) == TAINTED_KV
    assert not TAINTED_KV & Flags.PURE


def test_taint_refuses_a_negative_count() -> None:
    """A caller that counts wrong is told."""
    with pytest.raises(ConfigError):
        Taint(-1)


def test_every_scope_says_how_it_is_stored_and_only_prefixes_are_pure() -> None:
    """A choice that queries or the cut of a region made never lies under a prefix key."""
    assert set(STORED_AS) == set(Scope)
    assert [scope for scope, flags in STORED_AS.items() if flags & Flags.PURE] == [Scope.PREFIX]
    for flags in (*STORED_AS.values(), TAINTED_KV):
        assert check_flags(flags) == flags


def test_techniques_declare_their_scope() -> None:
    """Bounds of pages follow from the prefix, a window from positions, heavy hitters and votes from queries."""
    from kvpool.engine.attention.build import make_technique

    scopes = {name: make_technique(kind()).traits.scope for name, kind in TECHNIQUES.items()}
    assert scopes == {"streaming": Scope.POSITIONS, "h2o": Scope.QUERIES, "snapkv": Scope.QUERIES, "quest": Scope.PREFIX}
