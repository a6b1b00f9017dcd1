"""Blocks of this host's nodes, read by key: found on a board, copied or looked at in the arena. Blocking, for any thread.

Theory. A copy is right when the record's generation is the same after it as before: then the bytes were that block's all the time. A look
(`deliver`, `views.py`) puts a hold on the blocks first, and the node lets them be. Either way the header is compared with the one that
would have been written for the key, so a record that names the wrong place is noticed, and where bytes crossed a wire or a disk and
nobody has checked them since, so are both checksums. What isn't found, changes twice, or looks wrong is left to the way by gRPC, which
also tells the node about damage.
"""

import threading
import time
from collections.abc import Callable, Iterator, MutableSequence, Sequence

import numpy as np
import numpy.typing as npt

from kvpool.block import BlockKey, Framer
from kvpool.client.company import each
from kvpool.client.glance import Glance, Glances
from kvpool.client.held import Held
from kvpool.client.links import Links
from kvpool.client.local import LocalReach
from kvpool.errors import ClosedError
from kvpool.tier.board import ORDERED, BoardReader, Flag, Found
from kvpool.transport.reach import Bytes

Rows = Sequence[Bytes] | Bytes
"""Payloads, uint8 `[payload bytes]` each."""
Sink = Callable[[int, Bytes], None]
_TRIES = 2
_UNVERIFIED = int(Flag.UNVERIFIED)  # enum arithmetic is slow
_BATCH = 64
"""Blocks that are held at once."""


class Counts:
    """What direct reads of one client came to, in blocks: `hits`, `misses` (asked for by gRPC then), `retries` (changed amid a copy)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = {"hits": 0, "misses": 0, "retries": 0}

    def add(self, name: str, count: int) -> None:
        """Count some more."""
        with self._lock:
            self._counts[name] += count

    def __call__(self) -> dict[str, int]:
        """The counts so far."""
        return dict(self._counts)


class Limits:
    """When a call has to end: at `deadline_ns` (monotonic), or once `stopped` is set."""

    def __init__(self, deadline_ns: int, stopped: threading.Event | None = None) -> None:
        self.deadline_ns = deadline_ns
        self.stopped = stopped

    def over(self) -> bool:
        """Whether to end now."""
        return time.monotonic_ns() >= self.deadline_ns or (self.stopped is not None and self.stopped.is_set())


class Here:
    """The blocks of one namespace on this host's nodes, as far as `links` has them open. `always`: check every checksum."""

    def __init__(self, links: Links, framer: Framer, counts: Counts, *, always: bool) -> None:
        self._links = links
        self.glances = Glances(framer)
        self.header_bytes = framer.header_bytes
        self._counts = counts
        self._always = always

    def salted(self, framer: Framer) -> "Here":
        """The same of another namespace."""
        return Here(self._links, framer, self._counts, always=self._always)

    def reaches(self) -> Iterator[tuple[LocalReach, BoardReader]]:
        """The nodes of this host that are there."""
        for reach in self._links.locals:
            if reach.board is not None and reach.alive:
                yield reach, reach.board

    def leading(self, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks are here."""
        present: npt.NDArray[np.bool_] | None = None
        for _, board in self.reaches():
            found = board.find(keys, time.monotonic_ns())
            count = found.leading()
            if count == len(keys):
                return count
            present = found.present if present is None else present | found.present
        return 0 if present is None else int(np.argmin(np.append(present, False)))

    def present(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which blocks are here."""
        present = np.zeros(len(keys), np.bool_)
        for _, board in self.reaches():
            present |= board.find(keys, time.monotonic_ns()).present
        return present.tolist()

    def read(self, keys: Sequence[BlockKey], counts: Sequence[int], targets: Rows, limits: Limits) -> bytearray:
        """Copy what is here into `targets`; a byte a block, 1 where its payload has come.

        Where it hasn't, the target's bytes are unspecified. `counts`: tokens of each block.
        """
        got = bytearray(len(keys))
        if len(keys) == 1:
            got[0] = self._read_one(keys[0], self.glances[counts[0]], targets[0])
        else:
            for reach, board in self.reaches():
                memory = _memory_of(reach)
                if memory is not None:
                    self._read_from(reach, board, memory, keys, counts, targets, got, limits)
        hits = got.count(1)
        if hits:
            self._counts.add("hits", hits)
        if hits < len(got):
            self._counts.add("misses", len(got) - hits)
        return got

    def _read_one(self, key: BlockKey, glance: Glance, target: Bytes) -> bool:
        """`read` of one block, which has no arrays to make."""
        for reach in self._links.locals:
            board, tries = reach.board, _TRIES if reach.alive else 0
            while board is not None and tries:
                place = board.find_one(key, time.monotonic_ns())
                memory = _memory_of(reach)
                if place is None or memory is None:
                    break
                if not self._copy(reach, memory, place.offset, place.length, place.flags, key, glance, target):
                    break
                if board.still(place):
                    board.touch_one(place)
                    return True
                self._counts.add("retries", 1)
                tries -= 1
        return False

    def _read_from(
        self,
        reach: LocalReach,
        board: BoardReader,
        memory: Bytes,
        keys: Sequence[BlockKey],
        counts: Sequence[int],
        targets: Rows,
        got: bytearray,
        limits: Limits,
    ) -> None:
        """`read` from one node what hasn't come yet."""
        wanted: Sequence[int] = [j for j, came in enumerate(got) if not came]
        for _ in range(_TRIES):
            if not wanted or limits.over():
                return
            some = keys if len(wanted) == len(keys) else [keys[j] for j in wanted]
            found = board.find(some, time.monotonic_ns())
            good = self.glances.alike(memory, found, some, [counts[j] for j in wanted])
            wants = [(at, some[at], counts[j], targets[j]) for at, j in enumerate(wanted) if good[at]]
            copied = self._copy_all(memory, found, wants, doubtful=self._doubtful(reach, found), limits=limits)
            changed = self._take(board, found, copied, wanted, got)
            if changed:
                self._counts.add("retries", len(changed))
            wanted = changed

    def _copy_all(
        self, memory: Bytes, found: Found, wants: Sequence[tuple[int, BlockKey, int, Bytes]], *, doubtful: bool, limits: Limits
    ) -> list[int]:
        """Copy the payloads of (place in `found`, key, tokens, target); which places were copied, in order, and are sound if `doubtful`."""
        offsets, lengths, copied = found.offsets.tolist(), found.lengths.tolist(), list[int]()

        def copy(number: int) -> bool:
            at, key, n_tokens, target = wants[number]
            offset = offsets[at]
            np.copyto(target, memory[offset + self.header_bytes : offset + lengths[at]])
            if not doubtful or self._sound(memory, offset, key, n_tokens, target):
                copied.append(at)
            return not limits.over()

        each(len(wants), sum(target.size for *_, target in wants), copy)
        return sorted(copied)

    def _take(self, board: BoardReader, found: Found, copied: Sequence[int], wanted: Sequence[int], got: MutableSequence[int]) -> list[int]:
        """Note in `got` what was copied and is unchanged; the blocks that did change meanwhile."""
        changed: list[int] = []
        if copied and board.unchanged(found, copied[0], copied[-1] + 1):
            for at in copied:
                got[wanted[at]] = 1
        else:
            for at in copied:
                if board.unchanged(found, at, at + 1):
                    got[wanted[at]] = 1
                else:
                    changed.append(wanted[at])
        if copied:
            if copied[-1] >= len(copied):  # others lie between
                used = np.zeros_like(found.present)
                used[copied] = True
                found.present &= used
            board.touch(found, copied[-1] + 1)
        return changed

    def _copy(
        self, reach: LocalReach, memory: Bytes, offset: int, length: int, flags: int, key: BlockKey, glance: Glance, target: Bytes
    ) -> bool:
        """Copy a payload, if what lies there looks like the block."""
        start = offset + glance.header_bytes
        raw = memory[offset:start].tobytes()
        if length != glance.frame_bytes or not glance.matches(raw, key):
            return False
        np.copyto(target, memory[start : offset + length])
        return not self._doubts(reach, flags) or glance.sound(raw, key, target)

    def _doubts(self, reach: LocalReach, flags: int) -> bool:
        """Whether checksums must be looked at."""
        return self._always or not reach.by_generation or flags & _UNVERIFIED != 0

    def _doubtful(self, reach: LocalReach, found: Found) -> bool:
        """Whether that is so for any of what was found: then it is looked at for all."""
        return self._always or not reach.by_generation or bool((found.flags[found.present] & _UNVERIFIED).any())

    def _sound(self, memory: Bytes, offset: int, key: BlockKey, n_tokens: int, payload: Bytes) -> bool:
        """Whether both checksums of a frame are right; `payload` may be a copy of its own."""
        return self.glances[n_tokens].sound(memory[offset : offset + self.header_bytes].tobytes(), key, payload)

    def deliver(self, keys: Sequence[BlockKey], counts: Sequence[int], sink: Sink, limits: Limits) -> int:
        """Call `sink(j, payload)` with read-only payloads in the arena for the leading run that is here, held meanwhile.

        How many were delivered. A payload is valid only during the call. None is delivered where a hold is no promise (`ORDERED`).
        """
        done = came = 0
        while ORDERED and done < len(keys):
            for reach, board in self.reaches():
                came = self._deliver_from(reach, board, keys, counts, sink, done, limits)
                if came:
                    break
            if not came:
                break
            done, came = done + came, 0
        self._counts.add("hits", done)
        self._counts.add("misses", len(keys) - done)
        return done

    def _deliver_from(
        self,
        reach: LocalReach,
        board: BoardReader,
        keys: Sequence[BlockKey],
        counts: Sequence[int],
        sink: Sink,
        start: int,
        limits: Limits,
    ) -> int:
        """`deliver` of the next batch from one node."""
        some = keys[start : start + _BATCH]
        held = Held.take(reach, board, some)
        if held is None:
            return 0
        with held:
            came = 0
            for payload in self.payloads(held, some, counts[start : start + _BATCH]):
                if limits.over():
                    break
                sink(start + came, payload)
                came += 1
            held.touch(came)
            return came

    def trusted(self, reach: LocalReach, board: BoardReader, keys: Sequence[BlockKey]) -> int:
        """How many leading blocks could be held there now and need no look at their checksums."""
        if not ORDERED or self._always or not reach.by_generation:
            return 0
        found = board.find(keys, time.monotonic_ns())
        count = min(found.leading(), reach.room_to_hold)
        doubtful = np.flatnonzero(found.flags[:count] & np.uint64(_UNVERIFIED))
        return int(doubtful[0]) if doubtful.size else count

    def hold(self, keys: Sequence[BlockKey]) -> Held | None:
        """Hold the leading run of `keys` on the node of this host that has most of it; None where a hold is no promise (`ORDERED`)."""
        if not ORDERED:
            return None
        best: Held | None = None
        for reach, board in self.reaches():
            held = Held.take(reach, board, keys)
            if held is not None and (best is None or held.count > best.count):
                best, held = held, best
            if held is not None:
                held.release()
            if best is not None and best.count == len(keys):
                break
        self._counts.add("hits", best.count if best is not None else 0)
        return best

    def payloads(self, held: Held, keys: Sequence[BlockKey], counts: Sequence[int]) -> Iterator[Bytes]:
        """The payloads of what is held, read-only, up to the first that isn't what it should be."""
        memory, found = held.memory, held.found
        good = self.glances.alike(memory, found, keys, counts)
        offsets, lengths = found.offsets.tolist(), found.lengths.tolist()
        doubtful = self._doubtful(held.reach, found)
        for at in range(held.count):
            offset = offsets[at]
            payload = memory[offset + self.header_bytes : offset + lengths[at]]
            if not good[at] or (doubtful and not self._sound(memory, offset, keys[at], counts[at], payload)):
                return
            yield payload

    def shown(self, held: Held, keys: Sequence[BlockKey], counts: Sequence[int]) -> list[int]:
        """Where in `held.memory` these payloads begin."""
        good = self.glances.alike(held.memory, held.found, keys, counts)
        if all(good[: held.count]) and not self._doubtful(held.reach, held.found):
            starts: list[int] = (held.found.offsets[: held.count] + np.uint64(self.header_bytes)).tolist()
            return starts
        return [payload.ctypes.data - held.memory.ctypes.data for payload in self.payloads(held, keys, counts)]


def _memory_of(reach: LocalReach) -> Bytes | None:
    """The arena of a reach, None once it is closed. An array keeps what it shows mapped."""
    try:
        return reach.memory
    except ClosedError:
        return None
