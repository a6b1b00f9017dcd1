"""Who a block is: a 32-byte key that is a pure function of the tokens and of everything that shapes their KV.

Theory. ``root = sha256(domain || canonical(namespace))`` and ``key_i = sha256(key_(i-1) || tokens_i as u32 little-endian)``
with ``key_(-1) = root``. A key therefore names the whole prefix up to and including its block, and equal keys mean equal
KV, on every machine and in every process: nothing of the language's `hash()`, of the environment or of the process enters.
A trailing block with fewer than `block_tokens` tokens has a key by the same rule; its preimage is shorter, so it never
equals a full block's.

The canonical bytes are tag-length-value fields in the order of their tags, all always present, so no two namespaces share
bytes; a new field gets a new tag and a new domain.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NewType, cast

import numpy as np
import numpy.typing as npt

from kvpool.block.geometry import DTYPE_CODES, LAYOUT_LAYER_MAJOR, MAX_BLOCK_TOKENS, Geometry
from kvpool.block.layers import check_int, pack_layers
from kvpool.block.tlv import pack_tlvs
from kvpool.errors import ConfigError

BlockKey = NewType("BlockKey", bytes)
"""32 bytes that name a block."""

KEY_BYTES = 32
FINGERPRINT_BYTES = 16
MAX_TOKEN = 0xFFFFFFFF
_MAX_FIELD_BYTES = 4096
_STRIDE_TOKENS = 4096
_ROOT_DOMAIN = b"kvpool/namespace/v1\0"
_SALT_TAG = 8  # the last field, so that a salt can be put to canonical bytes without one
_NO_SALT = pack_tlvs(((_SALT_TAG, b""),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything that makes equal tokens unequal KV.

    `geometry` is that of the stored blocks: with `part_size > 1`, of this part (`for_part` derives it). `weights_digest`
    is 1..64 bytes over the weights; `rope` is a canonical text of the rotary state ("none" without one); `adapter` names a
    LoRA or is empty; `salt` separates tenants. Text fields take at most 4,096 bytes of UTF-8. Raises `ConfigError`.
    """

    model: str
    revision: str
    weights_digest: bytes
    geometry: Geometry
    rope: str
    part_rank: int = 0
    part_size: int = 1
    adapter: str = ""
    salt: bytes = b""

    def __post_init__(self) -> None:
        for name, needed in (("model", True), ("revision", False), ("rope", True), ("adapter", False)):
            _text(name, getattr(self, name), needed=needed)
        _octets("weights_digest", self.weights_digest, 1, 64)
        _octets("salt", self.salt, 0, _MAX_FIELD_BYTES)
        if not isinstance(self.geometry, Geometry):
            raise ConfigError("geometry must be a Geometry; build one with Geometry(...) or Geometry.uniform(...)")
        check_int("part_size", self.part_size, 1, 0xFFFF)
        check_int("part_rank", self.part_rank, 0, self.part_size - 1)

    def canonical(self) -> bytes:
        """The namespace as bytes: equal exactly when all fields are equal."""
        geometry = self.geometry
        shape = struct.pack("<HBBH", geometry.block_tokens, DTYPE_CODES[geometry.dtype], LAYOUT_LAYER_MAJOR, len(geometry.layers))
        return pack_tlvs(
            (
                (1, self.model.encode()),
                (2, self.revision.encode()),
                (3, self.weights_digest),
                (4, shape + pack_layers(geometry.layers)),
                (5, self.rope.encode()),
                (6, struct.pack("<HH", self.part_rank, self.part_size)),
                (7, self.adapter.encode()),
                (_SALT_TAG, self.salt),
            )
        )

    def root(self) -> BlockKey:
        """The 32-byte parent of every chain's first block."""
        return BlockKey(hashlib.sha256(_ROOT_DOMAIN + self.canonical()).digest())

    def fingerprint(self) -> bytes:
        """The first 16 bytes of the root: what a frame header carries to say whose blocks it belongs to."""
        return self.root()[:FINGERPRINT_BYTES]

    def for_part(self, rank: int, size: int) -> "Namespace":
        """This whole model's namespace (`part_size` 1) narrowed to tensor-parallel part `rank` of `size`."""
        if self.part_size != 1:
            raise ConfigError("this namespace is already a part; derive parts from the whole model's namespace")
        return replace(self, geometry=self.geometry.part(rank, size), part_rank=rank, part_size=size)


def salted_root(canonical: bytes, salt: bytes) -> BlockKey:
    """The root of the namespace whose canonical bytes without a salt are `canonical`, with `salt`. Raises `ConfigError` for other bytes.

    For those who route by keys and know a model's namespace only in this form.
    """
    _octets("salt", salt, 0, _MAX_FIELD_BYTES)
    if not canonical.endswith(_NO_SALT) or len(canonical) > 1 << 20:
        raise ConfigError("not the canonical bytes of a namespace without a salt")
    return BlockKey(hashlib.sha256(_ROOT_DOMAIN + canonical.removesuffix(_NO_SALT) + pack_tlvs(((_SALT_TAG, salt),))).digest())


def chain_keys(
    root: bytes,
    tokens: Sequence[int] | npt.NDArray[np.integer[Any]],
    block_tokens: int,
    *,
    parent: bytes | None = None,
    tail: bool = False,
) -> list[BlockKey]:
    """Keys of the consecutive blocks of `tokens`, in order: one per full block of `block_tokens` tokens.

    `tokens` is a list, a tuple or a one-dimensional integer array of ids in 0..2^32-1. `parent` is the key of the block
    before the first token (None: `tokens` begin the sequence). With `tail` a trailing partial block gets a key too.
    Raises `ConfigError`.
    """
    _octets("root", root, KEY_BYTES, KEY_BYTES)
    if parent is not None:
        _octets("parent", parent, KEY_BYTES, KEY_BYTES)
    check_int("block_tokens", block_tokens, 1, MAX_BLOCK_TOKENS)
    packed = _packed(tokens)
    full = len(packed) // block_tokens * block_tokens
    sha256, key = hashlib.sha256, root if parent is None else parent
    keys: list[bytes] = []
    # One call makes many blocks' byte strings, few enough to still be in the cache when they are hashed.
    stride = max(1, _STRIDE_TOKENS // block_tokens) * block_tokens
    for at in range(0, full, stride):
        blocks = packed[at : min(at + stride, full)].view(f"V{4 * block_tokens}").tolist()
        keys += [key := sha256(key + block).digest() for block in blocks]
    if tail and full < len(packed):
        keys.append(sha256(key + packed[full:].tobytes()).digest())
    return cast("list[BlockKey]", keys)


def _packed(tokens: Sequence[int] | npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.uint32]:
    """`tokens` as a contiguous array of little-endian u32."""
    if not isinstance(tokens, np.ndarray):
        return _packed_sequence(tokens)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ConfigError(f"tokens must be a one-dimensional array of integers, got {tokens.ndim} dimensions of {tokens.dtype}")
    if tokens.size and not (tokens.min() >= 0 and tokens.max() <= MAX_TOKEN):
        raise ConfigError(f"token ids must be between 0 and {MAX_TOKEN}, got {tokens.min()}..{tokens.max()}")
    return np.ascontiguousarray(tokens, dtype="<u4")


def _packed_sequence(tokens: Sequence[int]) -> npt.NDArray[np.uint32]:
    if isinstance(tokens, (str, bytes, bytearray, memoryview)):
        raise ConfigError(f"tokens must be integer ids, got {type(tokens).__name__}; tokenise the text first")
    try:
        words = array("I", tokens)
    except OverflowError:
        bad = next((t for t in tokens if not 0 <= int(t) <= MAX_TOKEN), "?")
        raise ConfigError(f"token ids must be between 0 and {MAX_TOKEN}, got {bad}") from None
    except TypeError as error:
        raise ConfigError(f"tokens must be a sequence of integer ids: {error}") from None
    if sys.byteorder == "big":
        words.byteswap()
    return np.frombuffer(words, dtype="<u4") if words else np.empty(0, "<u4")


def _text(name: str, value: object, *, needed: bool) -> None:
    if not isinstance(value, str) or (needed and not value):
        raise ConfigError(
            f"{name} must be {'non-empty ' if needed else ''}text, got {value!r}" + ('; write "none"' if name == "rope" else "")
        )
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"{name} holds characters that UTF-8 can't carry: {value!r}") from None
    if size > _MAX_FIELD_BYTES:
        raise ConfigError(f"{name} takes {size} bytes, at most {_MAX_FIELD_BYTES} are allowed; shorten it")


def _octets(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, bytes):
        raise ConfigError(f"{name} must be bytes, got {type(value).__name__}")
    if not low <= len(value) <= high:
        wanted = str(low) if low == high else f"{low} to {high}"
        raise ConfigError(f"{name} must be {wanted} bytes, got {len(value)}")
