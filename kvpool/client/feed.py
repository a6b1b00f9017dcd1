"""What a node holds, as told by its events: the bookkeeping of a consumer, and the connection that feeds it.

Theory. `NodeFeed` is the exact state of a node after change `sequence` of its life `incarnation`; while `complete` is False, that of the
part of the table read so far. `Feed` is only where that stands, for consumers that keep the blocks in a form of their own. Every batch says
where it starts, so one that is lost is noticed by the next, a keep-alive at the latest, and nothing is applied then: the feed stays where
it is and `follow` asks the node to go on from there. A batch of the past is ignored. So is one of an earlier life; a later life means that
all the feed has is gone.
"""

import asyncio
import enum
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Final

from kvpool.block import BlockKey
from kvpool.errors import ConfigError, RemoteError
from kvpool.request.events import KEEPALIVE_S, EventBatch, Stored
from kvpool.wire.events_client import EventsRpc

MAX_BLOCKS: Final = 1 << 22
"""Blocks that a feed takes unless told otherwise: about 1.2 GiB of memory."""

PATIENCE_S: Final = 5 * KEEPALIVE_S
"""A node that says nothing for so long is connected to anew."""
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0


class Applied(enum.Enum):
    """What became of a batch: taken in; of the past, so ignored; or something before it is missing, so it was not taken in."""

    DONE = "done"
    OLD = "old"
    GAP = "gap"


class Feed(ABC):
    """Where a consumer stands in the events of one node; what it makes of them is `take` and `drop`."""

    def __init__(self) -> None:
        self.incarnation = 0
        """The life of the node that this is of, 0: none yet."""
        self.sequence = 0
        """The last change that is taken in."""
        self.complete = False
        """Whether this is all that the node holds."""
        self._part = 0

    @property
    def position(self) -> tuple[int, int]:
        """From where to go on: life, and last change or 0 for a snapshot."""
        return self.incarnation, self.sequence if self.complete else 0

    def forget(self, incarnation: int = 0) -> None:
        """Back to nothing, of the life `incarnation`."""
        self.incarnation, self.sequence, self._part, self.complete = incarnation, 0, 0, False
        self.drop()

    @abstractmethod
    def drop(self) -> None:
        """All that was taken is gone."""

    @abstractmethod
    def take(self, batch: EventBatch) -> None:
        """`batch`, which follows, says what changed or, as a part of a snapshot, what is there too."""

    def apply(self, batch: EventBatch) -> Applied:
        """Take in a batch, if it follows."""
        if batch.incarnation < self.incarnation:
            return Applied.OLD
        if batch.incarnation > self.incarnation:
            self.forget(batch.incarnation)
        outcome = self._place_of(batch)
        if outcome is Applied.DONE:
            if batch.part == 1:
                self.forget(self.incarnation)
            self.sequence = batch.sequence
            self._part = batch.part or self._part
            if batch.last:
                self.complete, self._part = True, 0
            self.take(batch)
        return outcome

    def _place_of(self, batch: EventBatch) -> Applied:
        begun = self.complete or self._part > 0
        if batch.part == 1:
            return Applied.DONE if not begun or batch.sequence > self.sequence else Applied.OLD
        if not begun or batch.after > self.sequence:
            return Applied.GAP
        if batch.part == 0:
            return Applied.DONE if batch.sequence > self.sequence or batch.after == self.sequence else Applied.OLD
        if batch.sequence < self.sequence or self.complete or batch.part <= self._part:
            return Applied.OLD
        return Applied.DONE if batch.part == self._part + 1 else Applied.GAP


class NodeFeed(Feed):
    """The blocks of one node. `max_blocks` bounds the memory; for a node that holds more `apply` raises `ConfigError` and forgets all."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        super().__init__()
        self._held: dict[BlockKey, Stored] = {}
        self._max_blocks = max_blocks

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._held

    def get(self, key: BlockKey) -> Stored | None:
        """(key, parent, depth, tier) of a block that the node holds."""
        return self._held.get(key)

    def blocks(self) -> Iterable[Stored]:
        """All of them. Not to be kept over an `apply`."""
        return self._held.values()

    def drop(self) -> None:
        """Nothing is held."""
        self._held.clear()

    def take(self, batch: EventBatch) -> None:
        """Note what is held now."""
        for key in batch.removed:
            self._held.pop(key, None)
        self._held.update((one[0], one) for one in batch.stored)
        if len(self._held) > self._max_blocks:
            self.forget(self.incarnation)
            raise ConfigError(f"the node holds more than the {self._max_blocks} blocks that this feed may take; raise max_blocks")


async def follow(
    feed: Feed,
    connect: Callable[[], EventsRpc],
    *,
    patience_s: float = PATIENCE_S,
    on_error: Callable[[RemoteError], None] = lambda error: None,
) -> AsyncGenerator[EventBatch, None]:
    """Keep `feed` up to date for as long as this is iterated: each batch that was taken in, keep-alives too.

    `connect` makes a connection to where the node is now. A stream that breaks, or says nothing for `patience_s`, is reported to `on_error`
    and begun again where the feed is, after a pause of 0.1 to 5 s. Raises `ConfigError`, as `apply` does.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        rpc = connect()
        try:
            async with aclosing(rpc.watch(*feed.position, patience_s)) as batches:
                first = True
                async for batch in batches:
                    if first and batch.incarnation < feed.incarnation:
                        feed.forget()  # what a new connection says is no old news: the node's clock was set back
                    first = False
                    outcome = feed.apply(batch)
                    if outcome is Applied.GAP:
                        break
                    pause_s = _FIRST_PAUSE_S
                    if outcome is Applied.DONE:
                        yield batch
        except RemoteError as error:
            on_error(error)
        finally:
            await rpc.close()
        await asyncio.sleep(pause_s * (0.5 + random.random() / 2))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
