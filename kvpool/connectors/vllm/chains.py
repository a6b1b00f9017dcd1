"""From a request to the keys of its blocks.

A block has a *name*, the same on all ranks: vLLM's own hash of it where that means the same in every process, else a digest chain over its
tokens. Its *key* on one rank is sha256(root of the rank's namespace || name). Both are pure functions of the content.

vLLM's hashes cover LoRA (name and path), media and salt. The chain over tokens covers LoRA and salt; requests with media or embeddings have
no names then, and are not cached. The content of an adapter is in neither, so the digest of its weights goes into the names of both.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpool.block import BlockKey

_SEED = b"kvpool/vllm-tokens/1\0"


class Names:
    """The names of one request's blocks, as far as they are known; they only grow. `None` from `seed_of` means that it has none."""

    def __init__(self, request: Any, block_tokens: int, seed: bytes, *, by_hash: bool) -> None:
        self._request = request
        self._block_tokens = block_tokens
        self._seed = seed
        self._by_hash = by_hash
        self._names: list[bytes] = []

    def upto(self, count: int) -> list[bytes]:
        """The names of the first `count` blocks, or of those that are full by now."""
        if len(self._names) < count:
            self._extend(count)
        return self._names[:count]

    def _extend(self, count: int) -> None:
        have = len(self._names)
        if self._by_hash:
            new = [bytes(one) for one in self._request.block_hashes[have:count]]
            self._names += [hashlib.sha256(self._seed + one).digest() for one in new] if self._seed else new
            return
        tokens, size = self._request.all_token_ids, self._block_tokens
        name = self._names[-1] if have else hashlib.sha256(_SEED + self._seed).digest()
        for at in range(have * size, min(count, len(tokens) // size) * size, size):
            name = hashlib.sha256(name + np.asarray(tokens[at : at + size], "<u4").tobytes()).digest()
            self._names.append(name)


def seed_of(request: Any, adapter: bytes, *, by_hash: bool) -> bytes | None:
    """What goes into all names of a request beside its tokens: b"" for a plain one; None for one that can't be named.

    `adapter`: the digest of its LoRA's weights, b"" without one.
    """
    lora = getattr(request, "lora_request", None)
    if by_hash:
        return adapter
    if getattr(request, "mm_features", None) or getattr(request, "prompt_embeds", None) is not None:
        return None
    salt = getattr(request, "cache_salt", None)
    if lora is None and not salt:
        return b""
    text = "" if lora is None else f"{lora.lora_name}\0{lora.lora_path}"
    return hashlib.sha256(b"\0".join((adapter, text.encode(), (salt or "").encode()))).digest()


def keys_of(root: bytes, names: Sequence[bytes]) -> list[BlockKey]:
    """The keys of the blocks that are called `names`, on the rank whose namespace has `root`."""
    sha256 = hashlib.sha256
    return [BlockKey(sha256(root + name).digest()) for name in names]
