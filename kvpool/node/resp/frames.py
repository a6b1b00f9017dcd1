"""A value as a block: the key it is kept under, and the frame that holds its bytes.

A value is kept like any block, so tiers, checksums, quotas and tools know it as one. Its key is HMAC-SHA256 of its name under the tenant's
salt and a domain of its own: no block of an engine, and no value of another tenant, has it. A frame's payload is the value, zeros up to a
whole number of cells, and the value's length; cells are the tokens of a made-up model, so that a header can say how many there are.

A value isn't a function of its key alone, so its frame is DERIVED: what wants exact blocks refuses it.
All values follow a parent that nobody has, so nobody can say which node they belong to: they stay on the node they were written to.
"""

import hashlib
import hmac
import struct
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvpool.block import BlockKey, Flags, Framer, Geometry, LayerSpec, Namespace
from kvpool.errors import FrameError

PARENT = BlockKey(hashlib.sha256(b"kvpool/resp-parent/v1\0").digest())
"""What all values follow, and no block is."""
DEPTH = 1
"""Not the first of an extent."""

_KEY = b"kvpool/resp-key/v1\0"
_BLOCK_TOKENS = 512
_HEAD_DIM, _CELL = 16, 64  # bytes of a head: float16, K and V
_ONE_TOKEN_BYTES = 1 << 20
_LENGTH = struct.Struct("<Q")


def key_of(name: bytes, salt: bytes) -> BlockKey:
    """The key of the value called `name`, of the tenant with this salt (b"": of nobody)."""
    return BlockKey(hmac.digest(salt, _KEY + name, hashlib.sha256))


def frame_bytes(value_bytes: int) -> int:
    """Bytes of the frame of a value."""
    tokens, heads = _shape(value_bytes + _LENGTH.size)
    return _framer(heads).frame_bytes(tokens)


def write(frame: npt.NDArray[np.uint8], key: BlockKey, value: bytes) -> None:
    """Make `frame`, which has `frame_bytes(len(value))` bytes, the block `key` with this value."""
    tokens, heads = _shape(len(value) + _LENGTH.size)
    framer = _framer(heads)
    payload = frame[framer.header_bytes :]
    payload[: len(value)] = np.frombuffer(value, np.uint8)
    payload[len(value) : -_LENGTH.size] = 0
    payload[-_LENGTH.size :] = np.frombuffer(_LENGTH.pack(len(value)), np.uint8)
    framer.stamp(frame, key, PARENT, tokens)


def read(frame: npt.NDArray[np.uint8], key: BlockKey) -> memoryview:
    """The value in the frame of `key`, copied out and checked as copied. Raises `FrameError`."""
    copy = frame.tobytes()
    payload_bytes = len(copy) - _framer(1).header_bytes
    if payload_bytes < _CELL:
        raise FrameError(f"{len(copy)} bytes are no frame of a value")
    payload = _framer(_shape(payload_bytes)[1]).open(copy, key, accept_approx=True).payload
    (length,) = _LENGTH.unpack(payload[-_LENGTH.size :].data)
    if length > payload.size - _LENGTH.size:
        raise FrameError(f"a value of {length} bytes can't be in {payload.size}")
    return payload.data[:length]


def _shape(nbytes: int) -> tuple[int, int]:
    """(tokens, heads) of the payload that holds `nbytes`."""
    tokens = 1 if nbytes <= _ONE_TOKEN_BYTES else _BLOCK_TOKENS
    return tokens, -(-nbytes // (tokens * _CELL))


@lru_cache(maxsize=256)
def _framer(heads: int) -> Framer:
    geometry = Geometry((LayerSpec("full", heads, _HEAD_DIM, _HEAD_DIM),), _BLOCK_TOKENS, "float16")
    namespace = Namespace(model="kvpool/resp-value/v1", revision="", weights_digest=b"\0", geometry=geometry, rope="none")
    return Framer(namespace, flags=Flags.DERIVED)
