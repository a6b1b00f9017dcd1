"""Names of blocks: the same for equal content, others for anything else."""

import hashlib
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.connectors.vllm.chains import Names, keys_of, seed_of
from tests.connectors.vllm.engine import BLOCK, Request


def names(request: Request, *, by_hash: bool, adapter: bytes = b"", count: int = 9) -> list[bytes]:
    seed = seed_of(request, adapter, by_hash=by_hash)
    assert seed is not None
    return Names(request, BLOCK, seed, by_hash=by_hash).upto(count)


def request(tokens: list[int] | None = None, **fields: Any) -> Request:
    return Request("r", tokens if tokens is not None else list(range(10)), **fields)


def test_hashes_of_the_engine_are_names_as_they_are() -> None:
    """They are digests already, and cover what is said with a request."""
    assert names(request(), by_hash=True) == request().block_hashes
    assert names(request(mm_features=[1]), by_hash=True) == request().block_hashes


def test_token_names_are_a_chain_over_all_tokens_before() -> None:
    """Written down here once more: two processes, two machines, two versions agree."""
    got = names(request(), by_hash=False)
    begin = hashlib.sha256(b"kvpool/vllm-tokens/1\0").digest()
    first = hashlib.sha256(begin + struct.pack("<4I", 0, 1, 2, 3)).digest()
    assert got == [first, hashlib.sha256(first + struct.pack("<4I", 4, 5, 6, 7)).digest()]
    changed = names(request([99, *range(1, 10)]), by_hash=False)
    assert not set(got) & set(changed)


@pytest.mark.parametrize("by_hash", [True, False])
def test_names_grow_with_the_request(by_hash: bool) -> None:
    """Blocks that get full while decoding have the names that a later prompt will have."""
    one = request()
    growing = Names(one, BLOCK, b"", by_hash=by_hash)
    assert len(growing.upto(9)) == 2
    one.all_token_ids += [1, 2, 3]
    assert growing.upto(9) == names(request([*range(10), 1, 2, 3]), by_hash=by_hash)
    assert growing.upto(1) == growing.upto(9)[:1]


def test_adapter_and_salt_make_other_names() -> None:
    """Equal tokens, unequal KV, or nobody else's business."""
    lora = SimpleNamespace(lora_name="a", lora_path="/a")
    kinds = [
        names(request(), by_hash=False),
        names(request(lora_request=lora), by_hash=False, adapter=b"1"),
        names(request(lora_request=lora), by_hash=False, adapter=b"2"),
        names(request(cache_salt="x"), by_hash=False),
        names(request(lora_request=lora), by_hash=True, adapter=b"1"),
        names(request(lora_request=lora), by_hash=True, adapter=b"2"),
        names(request(), by_hash=True),
    ]
    assert len({one[0] for one in kinds}) == len(kinds)


@pytest.mark.parametrize("extra", [{"mm_features": [1]}, {"prompt_embeds": 0}])
def test_tokens_alone_do_not_name_media_or_embeddings(extra: dict[str, Any]) -> None:
    """Placeholders are equal for all pictures."""
    assert seed_of(request(**extra), b"", by_hash=False) is None


def test_keys_depend_on_the_rank() -> None:
    """Each rank stores its own bytes."""
    one, other = (keys_of(root, names(request(), by_hash=True)) for root in (b"1" * 32, b"2" * 32))
    assert [len(key) for key in one] == [32, 32]
    assert not set(one) & set(other)
