"""A look at a frame's header that costs half a microsecond: is this what would have been written for that key?

Theory. All headers of one namespace and length are equal but for the key, the parent, the payload's checksum and the header's crc32c. So a
template is cut at these four places and a header compared with it slice by slice, or, for many frames at once, word by word under a mask.
The key already names its parent, and who reads from memory that its owner keeps in order needs no checksum. `sound` is for bytes that
crossed a wire or a disk: both checksums.

A header that differs may still be good (a newer writer's extra field): `Framer.open` decides about such, on the way that has it.
"""

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpool.block import KEY_BYTES, BlockKey, Framer
from kvpool.block.header import CRC, CRC_AT, KEY_AT, PARENT_AT
from kvpool.tier.board import Found

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

_U64 = struct.Struct("<Q")
_LINE = 64
_LINE_BITS = np.array(6, np.uint64)
_MARK = 0x8F1D_A35B_C42E_7960
_KEY_END, _PARENT_END, _CRC_END = KEY_AT + KEY_BYTES, PARENT_AT + KEY_BYTES, CRC_AT + CRC.size
_KEY_WORDS = slice(KEY_AT // 4, _KEY_END // 4)


class Glance:
    """The frames of one namespace with `n_tokens` tokens. Never changes once made."""

    def __init__(self, framer: Framer, n_tokens: int) -> None:
        self.header_bytes = framer.header_bytes
        self.payload_bytes = framer.geometry.payload_bytes(n_tokens)
        self.frame_bytes = self.header_bytes + self.payload_bytes
        self.n_tokens = n_tokens
        self._framer = framer
        blank = BlockKey(bytes(KEY_BYTES))
        raw = framer.header(blank, blank, n_tokens, _MARK)
        self._checksum_at = at = raw.rindex(_U64.pack(_MARK))
        self._start, self._middle = raw[:KEY_AT], raw[_PARENT_END:CRC_AT]
        self._tags, self._end = raw[_CRC_END:at], raw[at + _U64.size :]
        self._lines = np.arange(self.header_bytes // _LINE)
        mask = bytearray(b"\xff" * self.header_bytes)
        for start, end in ((PARENT_AT, _PARENT_END), (CRC_AT, _CRC_END), (at, at + _U64.size)):
            mask[start:end] = bytes(end - start)
        self._mask = np.frombuffer(bytes(mask), np.uint32)
        self._expected = np.frombuffer(raw, np.uint32) & self._mask

    def matches(self, raw: bytes, key: BlockKey) -> bool:
        """Whether `raw`, `header_bytes` of them, is the header of `key`'s frame, checksums aside."""
        return (
            raw[KEY_AT:_KEY_END] == key
            and raw[:KEY_AT] == self._start
            and raw[_PARENT_END:CRC_AT] == self._middle
            and raw[_CRC_END : self._checksum_at] == self._tags
            and raw[self._checksum_at + _U64.size :] == self._end
        )

    def alike(self, memory: Bytes, offsets: Words, lengths: Words, keys: bytes) -> npt.NDArray[np.bool_]:
        """The same, of all frames at `offsets` at once: uint64 `[n]`, multiples of 64; `keys` are the joined keys. bool `[n]`.

        Offsets outside `memory` are no error and mean nothing.
        """
        lines = memory[: memory.size // _LINE * _LINE].reshape(-1, _LINE)
        at = (offsets >> _LINE_BITS).view(np.int64)
        heads = lines.take(at[:, None] + self._lines, axis=0, mode="clip").reshape(at.size, -1).view(np.uint32)
        heads[:, _KEY_WORDS] ^= np.frombuffer(keys, np.uint32).reshape(-1, KEY_BYTES // 4)
        heads ^= self._expected
        heads &= self._mask
        good: npt.NDArray[np.bool_] = (np.bitwise_or.reduce(heads, axis=1) == 0) & (lengths == self.frame_bytes)
        return good

    def sound(self, raw: bytes, key: BlockKey, payload: Bytes) -> bool:
        """The same with the header's crc32c and the payload's checksum, at the cost of hashing `payload`."""
        (checksum,) = _U64.unpack_from(raw, self._checksum_at)
        parent = BlockKey(raw[PARENT_AT:_PARENT_END])
        return self._framer.header(key, parent, self.n_tokens, checksum) == raw and self._framer.checksum(payload) == checksum


class Glances(dict[int, Glance]):
    """The glances of one namespace, by the number of tokens; made when first asked for."""

    def __init__(self, framer: Framer) -> None:
        super().__init__()
        self.framer = framer

    def alike(self, memory: Bytes, found: Found, keys: Sequence[BlockKey], counts: Sequence[int]) -> list[bool]:
        """Which of what was `found` is present and looks like the frames of `keys`, blocks of `counts` tokens each."""
        offsets, lengths = found.offsets, found.lengths
        if counts.count(counts[0]) == len(counts):
            good: list[bool] = (self[counts[0]].alike(memory, offsets, lengths, b"".join(keys)) & found.present).tolist()
            return good
        each = zip(keys, counts, range(len(keys)), found.present.tolist(), strict=True)
        return [there and self[n].alike(memory, offsets[j : j + 1], lengths[j : j + 1], key).item() for key, n, j, there in each]

    def __missing__(self, n_tokens: int) -> Glance:
        glance = self[n_tokens] = Glance(self.framer, n_tokens)
        return glance
