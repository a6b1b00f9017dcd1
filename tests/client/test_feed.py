"""A consumer's bookkeeping against a node's: whatever is lost, repeated, reordered or forgotten, it ends right and is never wrong."""

import random
from collections.abc import Callable
from hashlib import sha256
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.block import BlockKey
from kvpool.client.feed import Applied, NodeFeed
from kvpool.errors import ConfigError
from kvpool.pool import events as pool_events
from kvpool.pool.events import KvEvents, Watch
from kvpool.request.events import BELOW, BESIDE, DRAM, EventBatch, Stored

KEYS = [BlockKey(sha256(b"%d" % number).digest()) for number in range(12)]
RING, PART = 8, 3
"""Small, so that a few steps fall behind the ring, and a snapshot takes several parts."""


class World:
    """A node, restarted now and then, whose batches reach a feed over a bad connection."""

    def __init__(self) -> None:
        self.feed = NodeFeed()
        self.lives = 0
        self.history: dict[tuple[int, int], dict[BlockKey, Stored]] = {}
        self.sent: list[EventBatch] = []
        self.on_the_way: list[EventBatch] = []
        self.restart()

    def restart(self) -> None:
        self.lives += 1
        self.node = KvEvents(self.lives, RING)
        self.remember()
        self.connect()

    def remember(self) -> None:
        self.history[self.lives, self.node.sequence] = self.node.held()

    def connect(self) -> None:
        self.reader: Watch = self.node.watch(*self.feed.position)
        self.on_the_way = []

    def change(self, tier: int, number: int, *, stored: bool) -> None:
        if stored:
            self.node.stored(tier, KEYS[number], KEYS[number - 1] if number else None, 16 * number)
        else:
            self.node.removed(tier, KEYS[number])
        self.remember()

    def send(self) -> None:
        batch = self.reader.next() or self.reader.idle()
        self.sent.append(batch)
        self.on_the_way.append(batch)

    def deliver(self, batch: EventBatch) -> None:
        """Never wrong: what is said to be complete is what the node held at that number of that life."""
        outcome = self.feed.apply(batch)
        if self.feed.complete:
            assert {one[0]: one for one in self.feed.blocks()} == self.history[self.feed.incarnation, self.feed.sequence]
        if outcome is Applied.GAP:
            self.connect()

    def heal(self) -> None:
        """A connection that works, at the end: the feed gets there in a bounded number of batches."""
        for _ in range(40):
            batch = self.reader.next() or self.reader.idle()
            self.deliver(batch)
            if self.feed.complete and self.feed.position == (self.lives, self.node.sequence):
                break
        assert {one[0]: one for one in self.feed.blocks()} == self.node.held()
        assert self.feed.complete


STEPS = ("change", "flood", "send", "deliver", "pump", "lose", "repeat", "swap", "connect", "restart")


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 9), min_size=len(STEPS), max_size=len(STEPS)))
def test_feed_is_never_wrong_and_ends_at_the_truth(seed: int, weights: list[int]) -> None:
    """Any interleaving of changes, lost, repeated, reordered batches, restarts and falling behind."""
    rng = random.Random(seed)
    with patch.object(pool_events, "MAX_BATCH", PART):
        world = World()

        def change() -> None:
            world.change(rng.choice((DRAM, BESIDE, BELOW)), rng.randrange(len(KEYS)), stored=rng.random() < 0.6)

        def deliver() -> None:
            if world.on_the_way:
                world.deliver(world.on_the_way.pop(0))

        def flood() -> None:
            for _ in range(rng.randrange(2 * RING)):
                change()

        def repeat() -> None:
            if world.sent:
                world.deliver(rng.choice(world.sent[-8:]))

        def pump() -> None:
            for _ in range(rng.randrange(6)):
                world.send()
                deliver()

        steps: tuple[Callable[[], object], ...] = (
            change,
            flood,
            world.send,
            deliver,
            pump,
            lambda: world.on_the_way and world.on_the_way.pop(0),
            repeat,
            lambda: rng.shuffle(world.on_the_way),
            world.connect,
            world.restart,
        )
        for step in rng.choices(steps, [weight + 0.1 for weight in weights], k=120):
            step()
        world.connect()
        world.heal()


def batch_of(after: int, sequence: int, *, incarnation: int = 1, part: int = 0, last: bool = False, stored: str = "") -> EventBatch:
    blocks = tuple((BlockKey(name.encode() * 32), None, 0, DRAM) for name in stored)
    return EventBatch(incarnation=incarnation, after=after, sequence=sequence, stored=blocks, part=part, last=last)


def test_feed_tells_a_gap_from_a_repeat() -> None:
    """The one asks for more, the other for nothing."""
    feed = NodeFeed()
    assert feed.position == (0, 0)
    assert feed.apply(batch_of(5, 6)) is Applied.GAP  # nothing to build on
    assert feed.apply(batch_of(4, 4, part=1, stored="a")) is Applied.DONE
    assert (feed.complete, feed.position) == (False, (1, 0))
    assert feed.apply(batch_of(4, 4, part=3, last=True)) is Applied.GAP
    assert feed.apply(batch_of(4, 4, part=1, stored="a")) is Applied.OLD
    assert feed.apply(batch_of(4, 4, part=2, last=True, stored="b")) is Applied.DONE
    assert (feed.complete, feed.position, len(feed)) == (True, (1, 4), 2)
    assert feed.apply(batch_of(5, 7, stored="c")) is Applied.GAP
    assert feed.apply(batch_of(6, 6)) is Applied.GAP  # a keep-alive shows what was lost
    assert feed.apply(batch_of(4, 6, stored="c")) is Applied.DONE
    assert feed.apply(batch_of(4, 6, stored="c")) is Applied.OLD
    assert feed.apply(batch_of(4, 4, part=1, stored="z")) is Applied.OLD
    assert feed.apply(batch_of(6, 6)) is Applied.DONE
    block = feed.get(BlockKey(b"c" * 32))
    assert block == (b"c" * 32, None, 0, DRAM)
    assert BlockKey(b"z" * 32) not in feed


def test_later_life_ends_the_feed_and_an_earlier_one_is_ignored() -> None:
    """After a restart everything the node had in memory is gone, and nothing from before may come back."""
    feed = NodeFeed()
    feed.apply(batch_of(9, 9, incarnation=5, part=1, last=True, stored="ab"))
    assert feed.apply(batch_of(0, 1, incarnation=6, stored="c")) is Applied.GAP
    assert (len(feed), feed.complete, feed.position) == (0, False, (6, 0))
    assert feed.apply(batch_of(20, 20, incarnation=5, part=1, last=True, stored="ab")) is Applied.OLD
    assert feed.apply(batch_of(1, 1, incarnation=6, part=1, last=True, stored="c")) is Applied.DONE
    assert [one[0][:1] for one in feed.blocks()] == [b"c"]


def test_removal_of_a_block_that_is_not_there_is_harmless() -> None:
    """Each block of a batch is named as it is at the end, whether or not the feed has met it."""
    feed = NodeFeed()
    feed.apply(batch_of(1, 1, part=1, last=True))
    gone = EventBatch(incarnation=1, after=1, sequence=3, removed=(KEYS[0],))
    assert feed.apply(gone) is Applied.DONE
    assert len(feed) == 0


def test_feed_of_a_node_that_holds_too_much_says_so() -> None:
    """Bounded memory, and a clear word, not a part of the truth."""
    feed = NodeFeed(max_blocks=2)
    feed.apply(batch_of(1, 1, part=1, stored="ab"))
    with pytest.raises(ConfigError, match="max_blocks"):
        feed.apply(batch_of(1, 1, part=2, last=True, stored="c"))
    assert (len(feed), feed.complete) == (0, False)


@pytest.mark.parametrize(
    "wrong",
    [{"after": 3, "sequence": 2}, {"after": 1, "sequence": 2, "part": 1}, {"after": 2, "sequence": 2, "removed": (KEYS[0],), "part": 2}],
)
def test_batches_that_make_no_sense_can_not_be(wrong: dict[str, Any]) -> None:
    """Forward, or a part that stands still."""
    with pytest.raises(ValueError, match="goes forward"):
        EventBatch(incarnation=1, **wrong)
