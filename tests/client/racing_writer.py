"""A process that puts blocks into a small node as fast as it can, so that all others are evicted: python racing_writer.py ADDRESS SEED.

Each payload says whose it is: every word of it is the same eight bytes of the block's key. Blocks of two sizes make the node move some.
"""

import sys

import numpy as np
import numpy.typing as npt

import kvpool
from kvpool.block import BlockKey, Geometry, Namespace, chain_keys
from kvpool.client import Client

KEYS = 400
SIZES = (1 << 20, 160 << 10)


def namespace_of(nbytes: int) -> Namespace:
    """Blocks of `nbytes`."""
    geometry = Geometry.uniform(layers=1, kv_heads=1, head_dim=nbytes // 128, block_tokens=16, dtype="float32")
    return Namespace(model=f"race-{nbytes}", revision="1", weights_digest=bytes(32), geometry=geometry, rope="none")


def keys_of(namespace: Namespace) -> list[BlockKey]:
    """The blocks that are put, each a chain of its own."""
    return [chain_keys(namespace.root(), [number] * 16, 16)[0] for number in range(KEYS)]


def word_of(key: BlockKey) -> np.uint64:
    """What the payload of a block consists of."""
    return np.uint64(int.from_bytes(key[16:24], "little"))


def put_all(pool: Client, keys: list[BlockKey], numbers: npt.NDArray[np.int64]) -> None:
    """Put some of the blocks, one by one."""
    row = np.zeros((1, pool._geometry.payload_bytes(16)), np.uint8)
    for number in numbers:
        row.view(np.uint64)[:] = word_of(keys[number])
        pool.put_blocks([keys[number]], row)


def main(address: str) -> None:
    """Put at random until killed."""
    pools = [kvpool.connect(address, namespace=namespace_of(nbytes)) for nbytes in SIZES]
    keys = [keys_of(namespace_of(nbytes)) for nbytes in SIZES]
    dice = np.random.default_rng(int(sys.argv[2]))
    print("ready", flush=True)
    while True:
        for pool, some in zip(pools, keys, strict=True):
            put_all(pool, some, dice.integers(0, KEYS, 4))


if __name__ == "__main__":
    main(sys.argv[1])
