"""Frames of one namespace, fast: stamp a header in front of a payload, and open a frame that someone else wrote.

Theory. All headers of one namespace are equal but for the key, the parent, the number of tokens, the payload's length and
checksum, and the header's own crc32c. A `Framer` encodes one header as a template and afterwards only fills these in.
Opening goes the other way: it writes the header it would have written itself and compares. Only a header that differs (a
newer writer's extra field, or damage) is decoded field by field, to accept it or to say what is wrong.

A frame that opens is whole and is the block that was asked for; whatever else is a `FrameError`, which readers treat as a
miss. Frames that are not PURE are refused unless the caller says it accepts them: what is computed on top of a loss must
never pass for the exact block.
"""

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.block import header as h
from kvpool.block.geometry import Geometry
from kvpool.block.identity import KEY_BYTES, BlockKey, Namespace
from kvpool.block.layers import pack_layers
from kvpool.block.tlv import TLV_HEAD_BYTES
from kvpool.errors import ConfigError, FrameError

Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]
"""Contiguous bytes; an array passed as a frame is one-dimensional uint8."""

_MAX_CHECKSUM = (1 << 64) - 1
_PURE = int(h.Flags.PURE)  # enum arithmetic is slow
_U16, _U64 = struct.Struct("<H"), struct.Struct("<Q")


class FrameView(NamedTuple):
    """An opened frame; `payload` is a view of the caller's bytes, not a copy."""

    n_tokens: int
    payload: npt.NDArray[np.uint8]
    parent: BlockKey
    flags: h.Flags

    @property
    def approx(self) -> bool:
        """True when the block is not a pure function of its key (any of APPROX, DERIVED, SESSION)."""
        return not self.flags & h.Flags.PURE


class Framer:
    """Writes and opens the frames of one `Namespace`. Never changes once made, so any thread may use it.

    `geometry`: of these frames, where it isn't the namespace's, because a frame's size is not for all of them the same (`values.py`).
    """

    def __init__(self, namespace: Namespace, *, flags: h.Flags = h.Flags.PURE, geometry: Geometry | None = None) -> None:
        self.root: BlockKey = namespace.root()
        """The parent of a chain's first block."""
        self.geometry: Geometry = geometry or namespace.geometry
        self._fingerprint = namespace.fingerprint()
        self._flags = flags
        blank = BlockKey(bytes(KEY_BYTES))
        self._template = h.encode_header(
            h.FrameHeader(
                key=blank,
                parent=blank,
                fingerprint=self._fingerprint,
                geometry=self.geometry,
                n_tokens=1,
                payload_checksum=0,
                flags=flags,
            )
        )
        self._checksum_at = h.FIXED_BYTES + TLV_HEAD_BYTES + len(pack_layers(self.geometry.layers)) + TLV_HEAD_BYTES + 2
        self.header_bytes: int = len(self._template)
        """Bytes in front of every payload, a multiple of 64."""

    def frame_bytes(self, n_tokens: int) -> int:
        """Bytes of a whole frame of `n_tokens` tokens (1..block_tokens): header and payload."""
        return self.header_bytes + self.geometry.payload_bytes(n_tokens)

    def checksum(self, payload: Buffer) -> int:
        """xxh3_64 of a payload, an unsigned 64-bit number."""
        try:
            return xxhash.xxh3_64_intdigest(payload.data if isinstance(payload, np.ndarray) else payload)
        except (BufferError, ValueError):
            raise ConfigError("a payload must be contiguous in memory; copy it first (numpy.ascontiguousarray)") from None

    def header(self, key: BlockKey, parent: BlockKey, n_tokens: int, payload_checksum: int) -> bytes:
        """The header of one block. An empty `parent` stands for the root. Raises `ConfigError`."""
        parent = parent or self.root
        if not (isinstance(key, bytes) and isinstance(parent, bytes) and len(key) == len(parent) == KEY_BYTES):
            raise ConfigError(f"key and parent must be {KEY_BYTES} bytes each; take them from chain_keys")
        if not 0 <= payload_checksum <= _MAX_CHECKSUM:
            raise ConfigError("payload_checksum must be an unsigned 64-bit number; take it from checksum()")
        filled = bytearray(self._template)
        _U64.pack_into(filled, h.PAYLOAD_BYTES_AT, self.geometry.payload_bytes(n_tokens))
        _U16.pack_into(filled, h.TOKENS_AT, n_tokens)
        _U64.pack_into(filled, self._checksum_at, payload_checksum)
        filled[h.KEY_AT : h.PARENT_AT + KEY_BYTES] = key + parent
        raw = bytes(filled)
        return raw[: h.CRC_AT] + h.CRC.pack(h.header_crc(raw)) + raw[h.FIXED_BYTES :]

    def stamp(self, frame: Buffer, key: BlockKey, parent: BlockKey, n_tokens: int) -> None:
        """Write the header in front of the payload that already lies in ``frame[header_bytes:]``, in place.

        `frame` is exactly ``frame_bytes(n_tokens)`` writable bytes: a one-dimensional uint8 array or a memoryview. Raises `ConfigError`.
        """
        data = _as_array(frame)
        if not data.flags.writeable or data.size != self.frame_bytes(n_tokens):
            raise ConfigError(
                f"stamp needs {self.frame_bytes(n_tokens)} writable bytes, got {data.size}; pass frame[:frame_bytes(n_tokens)]"
            )
        checksum = self.checksum(data[self.header_bytes :])
        data[: self.header_bytes] = np.frombuffer(self.header(key, parent, n_tokens, checksum), np.uint8)

    def open(self, buf: Buffer, key: BlockKey, *, accept_approx: bool = False) -> FrameView:
        """Validate the frame that fills `buf` and return a view of it; its cost is that of hashing the payload.

        Raises `FrameError` unless `buf` is exactly one undamaged frame of this namespace and of `key`, and is PURE (or
        `accept_approx` is set).
        """
        data = _as_array(buf)
        n_tokens, header_bytes, checksum, parent, flags = self._own(data, key) or self._foreign(data, key)
        if not (accept_approx or int(flags) & _PURE):
            raise FrameError(f"the frame is {flags!r}, not the exact block of its key")
        payload = _sound_payload(data[header_bytes:], n_tokens, self.geometry.payload_bytes(n_tokens), checksum)
        return FrameView(n_tokens, payload, parent, flags)

    def _own(self, data: npt.NDArray[np.uint8], key: BlockKey) -> tuple[int, int, int, BlockKey, h.Flags] | None:
        """Fields of a header equal to the one this framer would have written for `key`; None when it is not."""
        raw = data[: self.header_bytes].tobytes()
        if len(raw) < self.header_bytes:
            return None
        (n_tokens,) = _U16.unpack_from(raw, h.TOKENS_AT)
        (checksum,) = _U64.unpack_from(raw, self._checksum_at)
        parent = BlockKey(raw[h.PARENT_AT : h.PARENT_AT + KEY_BYTES])
        if not 1 <= n_tokens <= self.geometry.block_tokens or self.header(key, parent, n_tokens, checksum) != raw:
            return None
        return n_tokens, self.header_bytes, checksum, parent, self._flags

    def _foreign(self, data: npt.NDArray[np.uint8], key: BlockKey) -> tuple[int, int, int, BlockKey, h.Flags]:
        """Fields of any other header that still is of this namespace and `key`; `FrameError` with the reason when not."""
        header = h.decode_header(data.data)
        if header.fingerprint != self._fingerprint or header.geometry != self.geometry:
            raise FrameError(f"the frame belongs to namespace {header.fingerprint.hex()}, not to {self._fingerprint.hex()}")
        if (header.flags ^ self._flags) & h.Flags.PRE_ROPE:
            raise FrameError("the frame's K and this reader's differ in rotation (PRE_ROPE)")
        if header.key != key:
            raise _other_block(header.key, key)
        return header.n_tokens, header.header_bytes, header.payload_checksum, header.parent, header.flags


def check_frame(buf: Buffer, key: BlockKey) -> None:
    """Raise `FrameError` unless `buf` is exactly one undamaged frame of `key`, of whatever namespace: for those who keep frames."""
    data = _as_array(buf)
    header = h.decode_header(data.data)
    if header.key != key:
        raise _other_block(header.key, key)
    _sound_payload(data[header.header_bytes :], header.n_tokens, header.payload_bytes, header.payload_checksum)


def _sound_payload(payload: npt.NDArray[np.uint8], n_tokens: int, expected: int, checksum: int) -> npt.NDArray[np.uint8]:
    """`payload`, once its length and checksum are seen to be right; `FrameError` otherwise."""
    if payload.size != expected:
        raise FrameError(f"a payload of {n_tokens} tokens has {expected} bytes, got {payload.size}")
    if xxhash.xxh3_64_intdigest(payload.data) != checksum:
        raise FrameError("payload checksum does not match")
    return payload


def _other_block(found: BlockKey, wanted: BlockKey) -> FrameError:
    return FrameError(f"the frame holds block {found.hex()}, not {wanted.hex()}")


def _as_array(buf: Buffer) -> npt.NDArray[np.uint8]:
    """`buf` as a one-dimensional array of its bytes, without a copy."""
    if isinstance(buf, np.ndarray):
        if buf.dtype == np.uint8 and buf.ndim == 1 and buf.flags.c_contiguous:
            return buf
        raise ConfigError(f"a frame must be a contiguous one-dimensional uint8 array, got {buf.ndim} dimensions of {buf.dtype}")
    view = memoryview(buf)
    if not view.contiguous:
        raise ConfigError("a frame must be contiguous in memory; copy it first")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
