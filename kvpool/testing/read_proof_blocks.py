"""What the processes of the read proof put and get: blocks of three sizes, each payload saying in every word which block it is.

Blocks of 32 KiB go through a session's slabs on a small node, those of 160 KiB and of 1 MiB by reserve and commit; sizes that don't divide
each other make the node move some.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.block import BlockKey, Geometry, Namespace, chain_keys
from kvpool.client.transfer import Payload
from kvpool.testing.load import content, is_right
from kvpool.units import KIB, MIB

BLOCK_TOKENS: Final = 16
SIZES: Final = (32 * KIB, 160 * KIB, MIB)
"""Bytes of a payload."""
_SEEN: Final = 10 * MIB
"""Bytes of all blocks of a size: several times what a small node has."""


class Model(NamedTuple):
    """Blocks of one size: the chains that there are."""

    namespace: Namespace
    payload_bytes: int
    chains: Sequence[Sequence[BlockKey]]

    @property
    def longest(self) -> int:
        """Blocks of the longest chain."""
        return max(map(len, self.chains))

    def room(self, blocks: int) -> npt.NDArray[np.float32]:
        """Memory for so many blocks, `[blocks, layers, 2, heads, tokens, dim]`."""
        return np.zeros((blocks, 1, 2, 1, BLOCK_TOKENS, self.payload_bytes // (2 * BLOCK_TOKENS * 4)), np.float32)


def models() -> list[Model]:
    """The same in every process."""
    return [_model(nbytes) for nbytes in SIZES]


def _model(nbytes: int) -> Model:
    geometry = Geometry.uniform(layers=1, kv_heads=1, head_dim=nbytes // (2 * BLOCK_TOKENS * 4), block_tokens=BLOCK_TOKENS, dtype="float32")
    namespace = Namespace(model=f"read-proof-{nbytes}", revision="1", weights_digest=bytes(32), geometry=geometry, rope="none")
    longest = 2 if nbytes == max(SIZES) else 6
    chains, left, chance = list[Sequence[BlockKey]](), _SEEN // nbytes, random.Random(nbytes)
    while left > 0:
        tokens = [len(chains)] * (BLOCK_TOKENS * chance.randint(1, longest))
        chains.append(chain_keys(namespace.root(), tokens, BLOCK_TOKENS))
        left -= len(chains[-1])
    return Model(namespace, nbytes, chains)


def bytes_of(block: npt.NDArray[np.generic]) -> Payload:
    """A block's array as it lies in memory, without a copy."""
    if not block.flags.c_contiguous:
        raise AssertionError("a block's payload is contiguous")
    flat: Payload = block.reshape(-1).view(np.uint8)
    return flat


def fill(chain: Sequence[BlockKey], rows: npt.NDArray[np.float32]) -> None:
    """Write what the blocks of `chain` must have."""
    for key, row in zip(chain, rows, strict=False):
        content(key, bytes_of(row))


def faults(chain: Sequence[BlockKey], blocks: Sequence[npt.NDArray[np.generic]]) -> Iterator[str]:
    """What is wrong with the blocks that were delivered for the leading run of `chain`, in words."""
    for at, (key, block) in enumerate(zip(chain, blocks, strict=False)):
        payload = bytes_of(block)
        if not is_right(key, payload):
            yield f"block {at} of {len(chain)}, {payload.size} B, {key[:4].hex()}: {_difference(key, payload.copy())}"


def _difference(key: BlockKey, payload: Payload) -> str:
    wanted = np.empty_like(payload)
    content(key, wanted)
    words, right = payload.view(np.uint64), wanted.view(np.uint64)
    bad = np.flatnonzero(words != right)
    if not bad.size:
        return "right again a moment later"
    other = int(words[bad[0]]) ^ int(bad[0])
    return f"{bad.size} of {words.size} words, from {bad[0]} to {bad[-1]}, the first as of block {other.to_bytes(8, 'little')[:4].hex()}"
