"""Steps that the processes of the read proof leave out on purpose, by subclasses put in the place of what the product uses.

Every reader of the proof dawdles, sabotaged or not: between finding and holding, and between looking at a header and copying what is
behind it, it sometimes sleeps for a moment, as any process may be made to.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from kvpool.block import BlockKey, Framer
from kvpool.client import glance, local, transfer
from kvpool.client.glance import Glance
from kvpool.client.transfer import Payload
from kvpool.tier.board import BoardReader, Found, Hold, Place
from kvpool.wire.pool_client import PoolRpc

SABOTAGES: Final = {"shm": ("reader", "hold", "unheld", "late"), "tcp": ("hold", "unheld"), "ucx": ("lease",), "grpc": ()}
"""What may be left out, by reach."""
_OFTEN: Final = 0.05
_LONGEST_S: Final = 0.004
_UNLEASED_S: Final = 0.05


def dawdle(often: float = _OFTEN, longest_s: float = _LONGEST_S) -> None:
    """Sleep for a moment, now and then."""
    if random.random() < often:
        time.sleep(random.random() * longest_s)


class SlowBoard(BoardReader):
    """One that has something else to do between finding and the rest."""

    def find(self, keys: Sequence[BlockKey] | bytes, now_ns: int) -> Found:
        """As ever, and then a pause."""
        found = super().find(keys, now_ns)
        dawdle()
        return found

    def find_one(self, key: BlockKey | bytes, now_ns: int) -> Place | None:
        """As ever, and then a pause."""
        place = super().find_one(key, now_ns)
        dawdle()
        return place


class BlindBoard(SlowBoard):
    """Nothing ever changes: neither copies nor holds look again."""

    def unchanged(self, found: Found, start: int, stop: int) -> bool:
        """As if it were."""
        return True

    def still(self, place: Place) -> bool:
        """As if it were."""
        return True


class _BlindCopies(BlindBoard):
    """A copy is taken without a second look; holds are as they should be."""

    def hold(self, found: Found, count: int) -> Hold | None:
        hold = super().hold(found, count)
        if hold is not None and not SlowBoard.unchanged(self, found, 0, count):
            hold.release()
            return None
        return hold


class _BlindHolds(BlindBoard):
    """A hold is taken without a second look; copies are as they should be."""

    def unchanged(self, found: Found, start: int, stop: int) -> bool:
        return self._holding or SlowBoard.unchanged(self, found, start, stop)

    def still(self, place: Place) -> bool:
        return SlowBoard.still(self, place)

    def hold(self, found: Found, count: int) -> Hold | None:
        self._holding = True
        try:
            return super().hold(found, count)
        finally:
            self._holding = False

    _holding = False


class _UnheldBoard(SlowBoard):
    """Holds that the node doesn't see."""

    def hold(self, found: Found, count: int) -> Hold | None:
        hold = super().hold(found, count)
        if hold is not None:
            hold.release()
        return hold


class _SlowGlance(Glance):
    """A look at a header, and then a pause."""

    def matches(self, raw: bytes, key: BlockKey) -> bool:
        good = super().matches(raw, key)
        dawdle()
        return good

    def alike(self, memory: Payload, offsets: Any, lengths: Any, keys: bytes) -> npt.NDArray[np.bool_]:
        good = super().alike(memory, offsets, lengths, keys)
        dawdle()
        return good


class _TrustingGlance(Glance):
    """Looks at no checksum."""

    def sound(self, raw: bytes, key: BlockKey, payload: Payload) -> bool:
        return self.matches(raw, key)


def _trusting_open(framer: Framer, frame: Payload, key: BlockKey, n_tokens: int) -> Payload | None:
    """As `transfer._open`, without a look at the frame."""
    return frame[framer.header_bytes :] if frame.size == framer.frame_bytes(n_tokens) else None


_acquire = PoolRpc.acquire


async def _unleased(rpc: PoolRpc, *args: Any, **more: Any) -> Any:
    """As `PoolRpc.acquire`, and the lease is given back at once, some time before the bytes are read."""
    answer = await _acquire(rpc, *args, **more)
    await rpc.release(answer[0], (), 1.0)
    await asyncio.sleep(random.random() * _UNLEASED_S)
    return answer


_BOARDS: Final = {"reader": _BlindCopies, "hold": _BlindHolds, "unheld": _UnheldBoard}


def in_reader(reach: str, sabotage: str) -> ExitStack:
    """What a reading process is while the context lasts."""
    stack = ExitStack()
    board = _BOARDS.get(sabotage, SlowBoard) if reach == "shm" else SlowBoard
    stack.enter_context(patch.object(local, "BoardReader", board))
    stack.enter_context(patch.object(glance, "Glance", _TrustingGlance if sabotage and reach != "shm" else _SlowGlance))
    if sabotage == "lease":
        stack.enter_context(patch.object(PoolRpc, "acquire", _unleased))
        stack.enter_context(patch.object(transfer, "_open", _trusting_open))
    return stack
