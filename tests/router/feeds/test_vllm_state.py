"""An engine's blocks get our names, the very ones a router makes of a prompt, or none."""

from typing import Any

import msgspec
import pytest

from kvpool.block import chain_keys
from kvpool.policy.prefix import PrefixIndex
from kvpool.policy.routing import WorkerRef
from router.feeds import vllm_state
from router.feeds.vllm_state import VllmBlocks, VllmCounts, unknown_adapter
from router.feeds.vllm_wire import read_batch
from router.testing.vllm import CLEARED, names_of, removed, stored
from tests.router.feeds.captured import captured, revived

ENGINE = WorkerRef("decode", "e" * 32, 1)
ROOT, LORA_ROOT, SALT_ROOT, BOTH_ROOT = (bytes([each]) * 32 for each in range(1, 5))
TOKENS = list(range(1000, 1128))
KEYS = chain_keys(ROOT, TOKENS, 16)


class Rig:
    """An index with one engine."""

    def __init__(self, block_tokens: int = 16, max_blocks: int = 1000) -> None:
        self.index: PrefixIndex[WorkerRef] = PrefixIndex()
        self.counts = VllmCounts()
        adapters, salts = {"poet": LORA_ROOT}, {(ROOT, "ours"): SALT_ROOT, (LORA_ROOT, "ours"): BOTH_ROOT}
        self.blocks = VllmBlocks(
            self.index, ENGINE, ROOT, block_tokens, adapters.get, self.counts,
            salts=lambda root, salt: salts.get((root, salt)), max_blocks=max_blocks,
        )  # fmt: skip

    def say(self, *events: Any) -> None:
        self.blocks.apply(read_batch(msgspec.msgpack.encode([1.0, list(events), 0])))

    def tiers(self, root: bytes = ROOT, block_tokens: int = 16) -> tuple[int, int, int]:
        return self.index.match(chain_keys(root, TOKENS, block_tokens)).tiers(ENGINE)


def test_blocks_are_found_under_the_keys_of_their_tokens() -> None:
    """Told in pieces, by number here and by bytes there, and gone one by one."""
    rig = Rig()
    rig.say(stored(TOKENS[:48], 16))
    rig.say(stored(TOKENS[:96], 16, first=3, as_bytes=True))
    assert rig.tiers() == (6, 0, 0)
    rig.say(*(removed([name]) for name in names_of(TOKENS[:96], 16)[:3:-1]))
    assert rig.tiers() == (4, 0, 0)
    assert (rig.counts.stored, rig.counts.removed, len(rig.blocks)) == (6, 2, 4)
    rig.say(CLEARED)
    assert (rig.tiers(), len(rig.blocks), rig.counts.cleared) == ((0, 0, 0), 0, 1)


def test_blocks_of_the_engine_may_be_several_of_ours() -> None:
    """Stock engines use blocks of 128 where ours are of 16."""
    rig = Rig()
    rig.say(stored(TOKENS, 64))
    assert rig.tiers() == (8, 0, 0)
    rig.say(removed(names_of(TOKENS, 64)[1:]))
    assert rig.tiers() == (4, 0, 0)


def test_blocks_that_are_no_whole_blocks_of_ours_are_refused() -> None:
    """Half a block has no name."""
    rig = Rig(block_tokens=32)
    rig.say(stored(TOKENS, 16))
    assert (rig.tiers(block_tokens=32), rig.counts.unmapped, len(rig.index)) == ((0, 0, 0), 8, 0)


def test_tiers_come_and_go_apart() -> None:
    """An offloaded block is in host memory, and still there when the GPU drops it; connectors leave the tokens out."""
    rig = Rig()
    names = names_of(TOKENS, 16)
    rig.say(stored(TOKENS, 16))
    rig.say(stored(TOKENS, 16, told=False, medium="CPU"), stored(TOKENS[:32], 16, told=False, medium="STORAGE", as_bytes=True))
    assert rig.tiers() == (8, 0, 0)
    rig.say(removed(names))
    assert rig.tiers() == (0, 8, 0)
    rig.say(removed(names, medium="CPU"))
    assert rig.tiers() == (0, 0, 2)
    rig.say(stored(list(range(64)), 16, told=False, medium="CPU"))
    assert rig.counts.orphans == 4


def test_adapters_have_their_own_names_and_unknown_ones_none() -> None:
    """Equal tokens under an adapter are other KV."""
    rig = Rig()
    extra = [["poet"]] * 8
    rig.say(stored(TOKENS, 16, salt="a", lora_name="poet", lora_id=1, extra_keys=extra))
    rig.say(stored(TOKENS, 16, salt="b", lora_name="poet", extra_keys=[[["lora", "poet", "/models/poet"]]] * 8))
    assert (rig.tiers(), rig.tiers(LORA_ROOT)) == ((0, 0, 0), (8, 0, 0))
    rig.say(stored(TOKENS, 16, salt="c", lora_name="painter"), stored(TOKENS, 16, salt="d", lora_id=3))
    assert (rig.counts.unmapped, rig.tiers()) == (16, (0, 0, 0))


@pytest.mark.parametrize("first", [["poet", "ours"], [["lora", "poet", "/models/poet"], ["cache_salt", "ours"]]])
def test_salt_under_an_adapter_has_keys_of_its_own(first: list[Any]) -> None:
    """Neither the adapter's for everybody nor the salt's without it; a salt that isn't ours has none."""
    rig = Rig()
    rig.say(stored(TOKENS, 16, lora_name="poet", extra_keys=[first, *[first[:1]] * 7]))
    assert rig.tiers(BOTH_ROOT) == (8, 0, 0)
    assert rig.tiers() == rig.tiers(LORA_ROOT) == rig.tiers(SALT_ROOT) == (0, 0, 0)
    rig.say(stored(TOKENS, 16, salt="b", lora_name="poet", extra_keys=[["poet", "theirs"], *[["poet"]] * 7]))
    assert rig.counts.unmapped == 8


def test_blocks_that_depend_on_more_than_tokens_are_refused_from_there_on() -> None:
    """An image, a salt: blocks before it are what they seem, those behind it are not."""
    rig = Rig()
    extra: list[Any] = [None, None, [["mm", "abc", 3]], *[None] * 5]
    rig.say(stored(TOKENS, 16, extra_keys=extra))
    assert (rig.tiers(), rig.counts.unmapped) == ((2, 0, 0), 6)
    longer = [*TOKENS, *range(16)]
    rig.say(stored(longer, 16, first=8))
    assert rig.counts.orphans == 1
    rig.say(stored(TOKENS, 16, salt="tenant", extra_keys=[["tenant"], *[None] * 7]))
    assert rig.counts.unmapped == 14


@pytest.mark.parametrize("first", [["ours"], [["cache_salt", "ours"]]])
def test_salt_that_is_ours_has_keys_of_its_own(first: list[Any]) -> None:
    """Bare as engines spell it, or after its kind; what follows the first block is found by its parent."""
    rig = Rig()
    rig.say(stored(TOKENS[:48], 16, salt="ours", extra_keys=[first, None, None]))
    rig.say(stored(TOKENS, 16, first=3, salt="ours"))
    assert (rig.tiers(), rig.tiers(SALT_ROOT)) == ((0, 0, 0), (8, 0, 0))
    other = ["theirs"] if len(first[0]) == 4 else [["cache_salt", "theirs"]]
    rig.say(stored(TOKENS[:48], 16, salt="theirs", extra_keys=[other, None, None]))
    assert (rig.counts.unmapped, rig.tiers()) == (3, (0, 0, 0))


def test_block_that_a_request_showed_goes_by_its_old_name() -> None:
    """All was forgotten, the engine still had it, a request found it there: then it is evicted."""
    rig = Rig()
    rig.say(stored(TOKENS, 16))
    rig.blocks.reset()
    rig.index.stored(ENGINE, KEYS, 2)
    assert rig.tiers() == (8, 0, 0)
    rig.say(removed(names_of(TOKENS, 16)[6:]))
    assert rig.tiers() == (6, 0, 0)


def test_block_behind_an_unknown_one_is_an_orphan_until_that_is_told() -> None:
    """What was lost can't be guessed; when the engine computes it again all is well."""
    rig = Rig()
    rig.say(stored(TOKENS, 16, first=3))
    assert (rig.tiers(), rig.counts.orphans) == ((0, 0, 0), 5)
    rig.say(stored(TOKENS, 16), stored(TOKENS, 16))
    assert rig.tiers() == (8, 0, 0)
    rig.say(removed(names_of(TOKENS, 16)))
    rig.say(stored(TOKENS, 16, first=2))
    rig.say(stored(TOKENS[:32], 16))
    assert rig.tiers() == (8, 0, 0)


def test_only_layers_of_full_attention_count() -> None:
    """A window's blocks go while the prefix is still good, and are no prefix."""
    rig = Rig()
    rig.say(stored(TOKENS, 16, group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=64))
    assert (rig.tiers(), rig.counts.other_groups) == ((0, 0, 0), 8)
    rig.say(stored(TOKENS, 16, group_idx=0, kv_cache_spec_kind="full_attention"))
    rig.say(removed(names_of(TOKENS, 16), group_idx=1))
    assert rig.tiers() == (8, 0, 0)


def test_token_ids_that_are_none_cost_their_event() -> None:
    """Numbers come from outside."""
    rig = Rig()
    rig.say(stored([*TOKENS[:15], -1], 16), stored([*TOKENS[:15], 1 << 40], 16), ["nonsense"], stored([*TOKENS[:15], "a"], 16))
    assert (rig.counts.unknown, len(rig.blocks)) == (4, 0)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that never removes anything must not fill the router."""
    monkeypatch.setattr(vllm_state, "MAX_PAST", 16)
    rig = Rig(max_blocks=20)
    for turn in range(10):
        rig.say(stored([turn, *TOKENS[1:]], 16))
        assert len(rig.blocks) <= 20
        assert rig.index.held(ENGINE) <= 20
    rig.say(CLEARED)
    rig.say(stored([9, *TOKENS[1:]], 16, first=4))
    assert len(rig.blocks) == 4


def test_captured_events_give_the_blocks_their_prompts_have() -> None:
    """Real engines: what is in the index at the end is what the engine held, under the keys of its tokens."""
    for message in captured():
        if message["seq"]:
            continue
        events = revived(message["decoded"])[1]
        size = events[0]["block_size"]
        index: PrefixIndex[WorkerRef] = PrefixIndex()
        blocks = VllmBlocks(index, ENGINE, ROOT, 16, unknown_adapter, VllmCounts())
        blocks.apply(read_batch(msgspec.msgpack.encode([1.0, events])))
        match = index.match(chain_keys(ROOT, events[0]["token_ids"], 16))
        assert match.tiers(ENGINE) == (len(events[0]["block_hashes"]) * size // 16, 0, 0)
