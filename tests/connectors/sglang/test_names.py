"""Names of pages: equal where the bytes are, different where they aren't."""

from typing import Any

import pytest

from kvpool.connectors.sglang import names
from kvpool.testing.sglang_contract import config_of
from kvpool.testing.sglang_pools import MhaPool, MlaPool, StatePool


def parts(name: str, pool: Any, **config: Any) -> list[str]:
    return names.parts_of(config_of("h:1", **config), name, pool)


def test_prefix_is_pinned_and_unambiguous() -> None:
    """Pages that are stored must be found by the next release."""
    assert names.prefix_of(["pool=kv", "layout=page_first"]).hex() == "1dc31f1c6cfa513e0049c710f0cef5dc"
    assert names.prefix_of(["ab", "c"]) != names.prefix_of(["a", "bc"])


def test_ranks_that_hold_other_bytes_have_other_names() -> None:
    """KV heads are split among tensor-parallel ranks, layers among stages, tokens among context-parallel ranks."""
    pool = MhaPool("page_first", 2)
    several: list[dict[str, int]] = [
        {}, {"tp_size": 2}, {"tp_size": 2, "tp_rank": 1}, {"pp_size": 2}, {"pp_size": 2, "pp_rank": 1},
        {"attn_cp_size": 2}, {"attn_cp_size": 2, "attn_cp_rank": 1},
    ]  # fmt: skip
    found = [tuple(parts("kv", pool, **one)) for one in several]
    assert len(set(found)) == len(several)


@pytest.mark.parametrize(
    ("name", "pool", "shared"),
    [
        ("kv", MlaPool("page_first", 2), True),
        ("indexer", MhaPool("page_first", 2), True),
        ("draft", MlaPool("page_first", 2), True),
        ("draft", MhaPool("page_first", 2), False),
        ("mamba", StatePool("page_first", 2), False),
    ],
)
def test_mla_ranks_share_what_they_hold_alike(name: str, pool: Any, shared: bool) -> None:
    """One rank writes the latents for all; states and drafts with heads are each rank's own."""
    one, other = (parts(name, pool, is_mla_model=True, tp_size=2, tp_rank=rank) for rank in range(2))
    assert (one == other) is shared
    assert (one == parts(name, pool, is_mla_model=True, tp_size=8, tp_rank=0)) is shared


def test_split_heads_have_the_names_of_the_finest_division() -> None:
    """Two ranks of two halves name the same four quarters as four ranks do."""
    pool = MhaPool("page_head", 2)
    split = {"tp_lcm_size": 4, "tp_size": 2, "should_split_heads": True}
    halves = [part for rank in range(2) for part in parts("kv", pool, tp_rank=rank, **split)]
    quarters = [part for rank in range(4) for part in parts("kv", pool, tp_rank=rank, tp_size=4, tp_lcm_size=4)]
    assert halves == quarters
    wide = names.facts_of(config_of("h:1", **split), "kv", MhaPool("page_head", 2, heads=4), (64, 64))
    assert wide == names.facts_of(config_of("h:1", tp_size=4, tp_lcm_size=4), "kv", MhaPool("page_head", 2, heads=2), (64, 64))


def test_facts_tell_layouts_and_types_apart() -> None:
    """Bytes in another order are as many, so a length doesn't tell."""
    config = config_of("h:1")
    pools = [MhaPool("page_first", 2), MhaPool("page_first_direct", 2), MlaPool("page_first", 2), MhaPool("page_first", 2, heads=2)]
    assert len({tuple(names.facts_of(config, "kv", pool, (64, 64))) for pool in pools}) == 4
    assert names.facts_of(config, "kv", pools[0], (1,)) != names.facts_of(config, "draft", pools[0], (1,))
