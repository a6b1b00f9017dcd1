"""What a bench stores: namespaces whose blocks have exactly a wanted size, chains of keys, and bytes that say which block they are."""

import uuid

import numpy as np
import numpy.typing as npt

from kvpool.block import BlockKey, Geometry, Namespace, chain_keys
from kvpool.errors import ConfigError
from kvpool.units import KIB, format_size

Rows = npt.NDArray[np.uint8]

BLOCK_TOKENS = 16


def space_of(size: int, *, salt: bytes = b"") -> Namespace:
    """A namespace with blocks of `size` bytes of `BLOCK_TOKENS` tokens. Without `salt` nobody else's.

    Raises `ConfigError` for sizes that no geometry has.
    """
    unit = 2 * 2 * BLOCK_TOKENS  # K and V, float16
    for layers in (32, 16, 8, 4, 2, 1):
        dim, rest = divmod(size, unit * layers)
        heads = max(1, dim // 128)
        if rest == 0 and dim and dim % heads == 0:
            geometry = Geometry.uniform(layers=layers, kv_heads=heads, head_dim=dim // heads, block_tokens=BLOCK_TOKENS, dtype="float16")
            return Namespace(
                model="kvpool bench",
                revision="1",
                weights_digest=b"no weights",
                geometry=geometry,
                rope="none",
                salt=salt or uuid.uuid4().bytes,
            )
    raise ConfigError(f"a block can't have {format_size(size)}; give a multiple of {unit} bytes, such as {format_size(64 * KIB)}")


def tokens_of(number: int, blocks: int) -> list[int]:
    """The tokens of chain `number`, `blocks` long; no two chains share a block."""
    return [number, *range(1, blocks * BLOCK_TOKENS)]


def chain_of(space: Namespace, number: int, blocks: int) -> list[BlockKey]:
    """The keys of chain `number`."""
    return chain_keys(space.root(), tokens_of(number, blocks), BLOCK_TOKENS)


def stamp(rows: Rows, number: int) -> Rows:
    """Make `rows` those of chain `number`: each begins and ends with who it is. The rows."""
    words = rows.view("<u8")
    words[:, 0] = words[:, -1] = _names(number, len(rows))
    return rows


def stamped(rows: Rows, number: int) -> bool:
    """Whether these are the leading rows of chain `number`."""
    words, names = rows.view("<u8"), _names(number, len(rows))
    return bool((words[:, 0] == names).all() and (words[:, -1] == names).all())


def wipe(rows: Rows) -> None:
    """Make `rows` nobody's, so that what is found there later has been read."""
    words = rows.view("<u8")
    words[:, 0] = words[:, -1] = 0


def _names(number: int, count: int) -> npt.NDArray[np.uint64]:
    return (np.uint64(number + 1) << np.uint64(32)) + np.arange(count, dtype=np.uint64)
