"""Finding blocks on another process's board without asking it.

Theory (order: `order.py`). All keys at once: the words of tags at both buckets of each key, the lanes that match, a slot a key, the slots'
generations, their records, their generations again. A tag is 14 bits, so one key in some thousand has a wrong lane that matches first; its
record has another key then, and it is looked up alone, lane by lane.
"""

import mmap
import threading
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvpool.block import BlockKey
from kvpool.errors import ConfigError, FrameError, UnavailableError
from kvpool.tier.board.cell import Cell, Hold
from kvpool.tier.board.found import UNORDERED, Found, Place, Slots, Words
from kvpool.tier.board.layout import (
    BUCKET_SLOTS,
    HITS,
    KEY,
    LANES,
    LENGTH_BITS,
    LENGTH_MASK,
    RECORD_BYTES,
    STATE_WORD,
    TAG_MASK,
    WORD,
    State,
    decode_header,
    page_of,
)
from kvpool.tier.board.order import Fence
from kvpool.tier.board.sealed import keeps_its_size
from kvpool.tier.superblock import node_bytes


def _word(value: int) -> Words:
    return np.array(value, np.uint64)


_TAG_MASK, _TWO, _LANES, _HITS = _word(TAG_MASK), _word(2), _word(LANES), _word(HITS)
_EVEN: Final = _word((1 << 64) - 2)
_LOW: Final = _word(0xFFFF_FFFF)
_HALF: Final = _word(32)
_TO_LANE: Final = _word((3 << 47) | (2 << 31) | (1 << 15))  # times 1 << (63 - 16 * lane): its top two bits are the lane
_TOP: Final = _word(62)
_LIVE: Final = int(State.LIVE)
_ALL_FOUR: Final = 0x01010101
_RECORD_WORDS: Final = RECORD_BYTES // WORD


class _Local(threading.local):
    """Each thread's fence."""

    def __init__(self) -> None:
        self.fence = Fence()


class BoardReader:
    """Finds blocks of one node on this host. All calls may come from several threads.

    `shape` says whose board it is. The descriptor stays the caller's and may be closed.
    """

    def __init__(self, fd: int, cell: Cell | None, node_id: str, incarnation: int) -> None:
        """Over the board behind `fd`. Without a `cell` nothing can be held, and touches go nowhere.

        Raises `UnavailableError` when it is another node's or incarnation's or has retired, `FrameError` when it is no sound board.
        """
        try:
            nbytes = keeps_its_size(fd)
            self.shape = decode_header(page_of(fd), nbytes)
        except (ConfigError, OSError) as error:
            raise FrameError(f"not a board: {error}") from error
        if self.shape[:2] != (node_bytes(node_id), incarnation):
            raise UnavailableError(f"this board is of another node or incarnation than {node_id}-{incarnation}")
        self._mapping = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self._words = memoryview(self._mapping).cast("Q")
        self._cell = cell
        buckets, slots = self.shape.buckets, self.shape.slots
        self._tags = np.frombuffer(self._mapping, np.uint64, buckets, self.shape.tags_at)
        self._records = np.frombuffer(self._mapping, np.uint64, slots * _RECORD_WORDS, self.shape.records_at)
        self._halves = self._records.reshape(slots * 2, 4)
        self._buckets = _word(buckets - 1)
        self._tags_word, self._records_word = self.shape.tags_at // WORD, self.shape.records_at // WORD
        self._local = _Local()
        if not self.live:
            raise UnavailableError("the owner of this board has retired")

    @property
    def live(self) -> bool:
        """False once the owner has retired. One that was killed stays live."""
        return self._words[STATE_WORD] == _LIVE

    def find(self, keys: Sequence[BlockKey] | bytes, now_ns: int) -> Found:
        """Where these blocks lie now; `keys` may be the joined bytes. Expired ones aren't present, and none is once not `live`."""
        joined = keys if isinstance(keys, bytes) else b"".join(keys)
        wanted = np.frombuffer(joined, np.uint64).reshape(-1, 4)
        slots, hits = self._candidates(wanted)
        at = slots << 3
        generations = self._records.take(at, mode="clip") & _EVEN  # an odd one is equal to nothing seen later
        half = slots << 1
        heads = self._halves.take(half, axis=0, mode="clip")
        half += 1
        tails = self._halves.take(half, axis=0, mode="clip")
        after = self._records.take(at, mode="clip")
        sound = (tails == wanted).view(np.uint32).reshape(-1) == _ALL_FOUR
        sound &= after == generations
        present = sound & (heads[:, 3] > now_ns)
        found = Found(slots, at, generations, heads, present)
        if b"\0" in present.tobytes():
            self._look_again(found, joined, np.flatnonzero(hits.any(0) & ~sound), now_ns)
        if self._words[STATE_WORD] != _LIVE:
            present[:] = False
        return found

    def find_one(self, key: BlockKey | bytes, now_ns: int) -> Place | None:
        """Where this block lies now; None when it isn't here."""
        words, first = self._words, KEY.unpack(key)
        tag = (first[0] & TAG_MASK) * LANES
        for choice in (first[1], first[2]):
            bucket = choice & self.shape.buckets - 1
            hits = (HITS - (words[self._tags_word + bucket] ^ tag)) & HITS
            while hits:
                top = hits.bit_length()
                lane = 4 - (top >> 4)
                hits ^= 1 << top - 1
                place = self._place(bucket * BUCKET_SLOTS + lane, key, now_ns)
                if place is not None:
                    return place
        return None

    def unchanged(self, found: Found, start: int, stop: int) -> bool:
        """Whether every block of `found[start:stop]` that is present is still there: what was copied since `find` is theirs."""
        self._local.fence()
        now = self._records.take(found.at[start:stop], mode="clip")
        if now.tobytes() != found.generations[start:stop].tobytes():
            present = found.present[start:stop]
            if not np.array_equal(now[present], found.generations[start:stop][present]):
                return False
        return self.live

    def still(self, place: Place) -> bool:
        """`unchanged` for one place."""
        self._local.fence()
        words = self._words
        return words[self._records_word + place.slot * _RECORD_WORDS] == place.generation and words[STATE_WORD] == _LIVE

    def hold(self, found: Found, count: int) -> Hold | None:
        """Keep the first `count` blocks where they are until the hold is released; they must be present.

        None, and then nothing is held: one has changed or isn't present, the cell is full, or there is none.
        """
        if self._cell is None or not 1 <= count <= found.leading():
            return None
        hold = self._cell.hold(found.slots[:count])
        if hold is None:
            return None
        if not self.unchanged(found, 0, count):
            hold.release()
            return None
        return hold

    def touch(self, found: Found, count: int) -> None:
        """Tell the owner that the first `count` blocks were used; those that aren't present are no use of anything."""
        if self._cell is None:
            return
        slots, generations = found.slots[:count].view(np.uint64), found.generations[:count]
        entries = (generations << _HALF) | (slots & _LOW)
        present = found.present[:count]
        self._cell.touch(entries if b"\0" not in present.tobytes() else entries[present])

    def touch_one(self, place: Place) -> None:
        """`touch` for one place."""
        if self._cell is not None:
            self._cell.touch_one(place.slot | (place.generation & 0xFFFF_FFFF) << 32)

    def _candidates(self, wanted: Words) -> tuple[Slots, Words]:
        """The one slot where each key may be, int64 `[n]`, and a bit for each lane that matched, uint64 `[2, n]`."""
        buckets = np.bitwise_and(wanted.T[1:3], self._buckets)
        tags = wanted[:, 0] & _TAG_MASK
        tags *= _LANES
        hits = self._tags.take(buckets.view(np.int64), mode="clip")
        hits ^= tags
        np.subtract(_HITS, hits, out=hits)
        hits &= _HITS
        lanes = hits * _TO_LANE
        lanes >>= _TOP
        buckets <<= _TWO
        buckets |= lanes
        return np.where(hits[0], buckets[0], buckets[1]).view(np.int64), hits

    def _look_again(self, found: Found, joined: bytes, which: Slots, now_ns: int) -> None:
        """One by one those whose candidate was another key's, or nobody's."""
        for index in which.tolist():
            place = self.find_one(joined[32 * index : 32 * index + 32], now_ns)
            if place is not None:
                found.put(index, place)

    def _place(self, slot: int, key: bytes, now_ns: int) -> Place | None:
        at = self._records_word + slot * _RECORD_WORDS
        generation = self._words[at]
        raw = self._mapping[at * WORD : at * WORD + RECORD_BYTES]
        if generation & 1 or not raw.endswith(key):
            return None
        _, offset, length, expires_ns = KEY.unpack_from(raw)
        if expires_ns <= now_ns or self._words[at] != generation or self._words[STATE_WORD] != _LIVE:
            return None
        return Place(slot, generation, offset, length & LENGTH_MASK, length >> LENGTH_BITS | UNORDERED)
