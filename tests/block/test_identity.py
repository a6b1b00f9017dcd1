"""Namespaces and key chains."""

import hashlib
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.block import Geometry, LayerSpec, Namespace, chain_keys
from kvpool.errors import ConfigError

GEOMETRY = Geometry.uniform(layers=2, kv_heads=4, head_dim=8, block_tokens=16, dtype="float16")
BASE = Namespace(model="m", revision="r", weights_digest=b"w" * 32, geometry=GEOMETRY, rope="none")
ROOT = BASE.root()
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "m2"},
        {"model": "mr", "revision": ""},
        {"revision": "r2"},
        {"weights_digest": b"w" * 31},
        {"rope": "theta=10000"},
        {"part_size": 2},
        {"part_size": 2, "part_rank": 1},
        {"adapter": "a"},
        {"salt": b"a"},
        {"geometry": replace(GEOMETRY, block_tokens=17)},
        {"geometry": replace(GEOMETRY, dtype="bfloat16")},
        {"geometry": replace(GEOMETRY, layers=GEOMETRY.layers[:1])},
        {"geometry": replace(GEOMETRY, layers=(LayerSpec("window", 4, 8, 8, 64),) * 2)},
    ],
    ids=str,
)
def test_root_any_field_changed_differs(change: dict[str, Any]) -> None:
    """Whatever makes equal tokens unequal KV must make the keys unequal, and fields must not run into each other."""
    assert replace(BASE, **change).root() != ROOT


def test_for_part_narrows_geometry_and_keeps_the_rest() -> None:
    """A worker's namespace follows from the model's and its rank."""
    part = BASE.for_part(1, 2)
    assert (part.part_rank, part.part_size, part.geometry) == (1, 2, GEOMETRY.part(1, 2))
    assert part.root() not in (ROOT, BASE.for_part(0, 2).root())
    with pytest.raises(ConfigError, match="already a part"):
        part.for_part(0, 2)


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"model": ""}, "model"),
        ({"model": 7}, "model"),
        ({"model": "x" * 4097}, "shorten"),
        ({"model": "\ud800"}, "UTF-8"),
        ({"rope": ""}, 'write "none"'),
        ({"weights_digest": b""}, "weights_digest"),
        ({"weights_digest": "ff"}, "bytes"),
        ({"weights_digest": bytes(65)}, "1 to 64"),
        ({"salt": bytes(4097)}, "salt"),
        ({"geometry": None}, "Geometry"),
        ({"part_size": 0}, "part_size"),
        ({"part_rank": 1}, "part_rank"),
    ],
    ids=str,
)
def test_namespace_impossible_raises_with_hint(change: dict[str, Any], hint: str) -> None:
    """A wrong namespace would split or, worse, merge caches; it must not come into being."""
    with pytest.raises(ConfigError, match=hint):
        replace(BASE, **change)


@settings(deadline=None)
@given(TOKENS, st.integers(1, 20))
def test_chain_keys_any_tokens_equal_definition(tokens: list[int], block: int) -> None:
    """key_i = sha256(key_(i-1) || tokens as u32 little-endian), for lists, tuples, arrays and any block size."""
    expected, parent = [], bytes(ROOT)
    for at in range(0, len(tokens), block):
        parent = hashlib.sha256(parent + b"".join(t.to_bytes(4, "little") for t in tokens[at : at + block])).digest()
        expected.append(parent)
    full = len(tokens) // block
    assert chain_keys(ROOT, tokens, block, tail=True) == expected
    assert chain_keys(ROOT, tokens, block) == expected[:full]
    for dtype in (np.uint32, np.int64, np.uint64, ">u4", ">i8"):
        assert chain_keys(ROOT, np.array(tokens, dtype=dtype), block, tail=True) == expected
    assert chain_keys(ROOT, tuple(np.array(tokens, dtype=np.int64)), block, tail=True) == expected


@settings(deadline=None)
@given(TOKENS, st.integers(1, 8), st.integers(0, 8))
def test_chain_keys_continued_from_parent_equal_whole(tokens: list[int], block: int, cut: int) -> None:
    """A chain extended block by block while decoding is the chain computed at once."""
    whole = chain_keys(ROOT, tokens, block, tail=True)
    cut = min(cut, len(tokens) // block)
    head = chain_keys(ROOT, tokens[: cut * block], block)
    rest = chain_keys(ROOT, tokens[cut * block :], block, parent=head[-1] if head else None, tail=True)
    assert head + rest == whole


def test_chain_keys_array_kinds_and_views_agree() -> None:
    """A slice, a reversed view or a narrow dtype is the same tokens."""
    tokens = np.arange(200, dtype=np.int64)
    expected = chain_keys(ROOT, list(range(0, 200, 2)), 16)
    assert chain_keys(ROOT, tokens[::2], 16) == expected
    assert chain_keys(ROOT, tokens[::-2][::-1] - 1, 16) == expected
    assert chain_keys(ROOT, tokens[::2].astype(np.uint8), 16) == expected
    assert chain_keys(ROOT, range(0, 200, 2), 16) == expected


def test_chain_keys_batch_of_8192_blocks_equals_plain_loop() -> None:
    """The size a long prompt needs in one call."""
    tokens = np.random.default_rng(1).integers(0, 49152, 8192 * 16)
    data, parent, expected = tokens.astype("<u4").tobytes(), bytes(ROOT), []
    for at in range(0, len(data), 64):
        parent = hashlib.sha256(parent + data[at : at + 64]).digest()
        expected.append(parent)
    keys = chain_keys(ROOT, tokens, 16)
    assert keys == expected
    assert all(type(key) is bytes for key in keys)


def test_chain_keys_nothing_or_less_than_a_block_is_empty() -> None:
    """No full block, no key; the tail needs at least one token."""
    assert chain_keys(ROOT, [], 16, tail=True) == []
    assert chain_keys(ROOT, np.empty(0, np.int64), 16, tail=True) == []
    assert chain_keys(ROOT, [1] * 15, 16) == []
    assert len(chain_keys(ROOT, [1] * 16, 16, tail=True)) == 1


@pytest.mark.parametrize(
    ("tokens", "hint"),
    [
        ([1, -1], "got -1"),
        ([1, 2**32], "got 4294967296"),
        (np.array([5, -7]), r"got -7\.\.5"),
        (np.array([5, 2**32]), "4294967296"),
        (np.array([2**63], dtype=np.uint64), "9223372036854775808"),
        (np.array([-1], dtype=np.int8), "got -1"),
        ([1.0], "integer ids"),
        (["a"], "integer ids"),
        (None, "integer ids"),
        (np.array([1.0]), "float64"),
        (np.array([True]), "bool"),
        (np.array([[1, 2]]), "2 dimensions"),
        ("text", "tokenise"),
        (b"bytes", "tokenise"),
    ],
    ids=str,
)
def test_chain_keys_bad_tokens_raise_with_hint(tokens: Any, hint: str) -> None:
    """A token that does not fit must not be wrapped into another token's key."""
    with pytest.raises(ConfigError, match=hint):
        chain_keys(ROOT, tokens, 2)


@pytest.mark.parametrize(
    "change", [{"root": b"short"}, {"root": "r" * 32}, {"parent": bytes(31)}, {"block_tokens": 0}, {"block_tokens": 513}]
)
def test_chain_keys_bad_arguments_raise(change: dict[str, Any]) -> None:
    """A root or parent of another length would start a chain that no one else can find."""
    arguments: dict[str, Any] = {"root": ROOT, "tokens": [1, 2], "block_tokens": 2, "parent": None, **change}
    with pytest.raises(ConfigError, match=next(iter(change))):
        chain_keys(**arguments)


SCRIPT = """
from kvpool.block import Geometry, Namespace, chain_keys
geometry = Geometry.uniform(layers=2, kv_heads=4, head_dim=8, block_tokens=16, dtype="float16")
namespace = Namespace(model="m", revision="r", weights_digest=b"w" * 32, geometry=geometry, rope="none")
print(b"".join(chain_keys(namespace.root(), list(range(100)), 16, tail=True)).hex())
"""


@pytest.mark.parametrize("seed", ["0", "4242"])
def test_chain_keys_other_process_and_hash_seed_are_equal(seed: str) -> None:
    """Identity must not come from Python's hash(): another process with another seed finds the same blocks."""
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, cwd=root, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == b"".join(chain_keys(ROOT, list(range(100)), 16, tail=True)).hex()


def test_chain_keys_random_prompts_do_not_collide() -> None:
    """Distinct prefixes, distinct keys, also across block sizes and partial tails."""
    draw = random.Random(7)
    prompts = {tuple(draw.randrange(4) for _ in range(draw.randrange(1, 12))) for _ in range(500)}
    last = {prompt: chain_keys(ROOT, prompt, 4, tail=True)[-1] for prompt in prompts}
    assert len(set(last.values())) == len(prompts)
