"""An engine is followed through everything that can happen to its messages; what it held is never believed after doubt."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from kvpool.block import chain_keys
from kvpool.errors import ConfigError
from kvpool.policy.prefix import PrefixIndex
from kvpool.policy.routing import WorkerRef
from router.feeds import VllmFeed
from router.testing.vllm import CLEARED, StockEngine, names_of, removed, stored

ENGINE = WorkerRef("decode", "e" * 32, 1)
ROOT = b"\1" * 32
TOKENS = list(range(160))
KEYS = chain_keys(ROOT, TOKENS, 16)


class Rig:
    """One engine, followed."""

    def __init__(self, engine: StockEngine, **options: Any) -> None:
        self.engine = engine
        self.index: PrefixIndex[WorkerRef] = PrefixIndex()
        told: dict[str, Any] = {"replay_s": 2.0, "silence_s": 30.0, "replay_pause_s": 0.0}
        ends = {"endpoint": engine.endpoint, "replay_endpoint": engine.replay_endpoint}
        self.feed = VllmFeed(self.index, holder=ENGINE, root=ROOT, block_tokens=16, **(ends | told | options))

    def blocks(self) -> int:
        return self.index.match(KEYS).of(ENGINE)

    async def until(self, true: Callable[[], bool], *, saying: Callable[[], Awaitable[Any]] | None = None) -> None:
        """Wait for it, repeating what a listener that is just connecting may not hear."""
        async with asyncio.timeout(20):
            while not true():
                if saying is not None:
                    await saying()
                await asyncio.sleep(0.01)

    async def listening(self) -> None:
        """Until messages arrive. They are empty, and counted like any other."""
        before = self.feed.counts.batches
        await self.until(lambda: self.feed.counts.batches > before and self.feed.complete, saying=self.engine.say)

    async def heard(self) -> None:
        """Until a message that is sent now has been taken in, and so all before it."""
        sequence, _ = await self.engine.say()
        await self.until(lambda: self.feed._order.next > sequence)


@asynccontextmanager
async def rig(*, options: dict[str, Any] | None = None, **kind: Any) -> AsyncIterator[Rig]:
    engine = StockEngine(**kind)
    await engine.start()
    one = Rig(engine, **(options or {}))
    one.feed.start()
    try:
        await one.listening()
        yield one
    finally:
        await one.feed.close()
        await engine.stop()
    assert one.index.holders() == ()


@pytest.mark.parametrize("kind", [{}, {"arrays": True, "replay_topic": True, "topic": b"kv@a"}])
async def test_blocks_come_and_go_as_the_engine_says(kind: dict[str, Any]) -> None:
    """The plain way, of old and new engines."""
    async with rig(**kind) as one:
        await one.engine.say(stored(TOKENS[:64], 16), stored(TOKENS, 16, first=4))
        await one.engine.say(removed(names_of(TOKENS, 16)[8:]))
        await one.heard()
        assert one.blocks() == 8
        await one.engine.say(CLEARED, stored(TOKENS[:32], 16, as_bytes=True))
        await one.heard()
        assert (one.blocks(), one.feed.counts.gaps, one.feed.counts.resets) == (2, 0, 0)


async def test_history_is_replayed_to_a_router_that_comes_late() -> None:
    """What was said before it listened is had from the engine's memory."""
    engine = StockEngine()
    await engine.start()
    await engine.say(stored(TOKENS[:64], 16))
    await engine.say(stored(TOKENS, 16, first=4))
    one = Rig(engine)
    one.feed.start()
    await one.until(lambda: one.feed.complete)
    assert one.blocks() == 10
    await one.feed.close(forget=False)
    assert one.blocks() == 10
    await engine.stop()


async def test_lost_messages_are_replayed() -> None:
    """A gap shows with the next message, and nothing is lost for good."""
    async with rig() as one:
        await one.engine.say(stored(TOKENS[:64], 16))
        await one.engine.say(stored(TOKENS[:96], 16, first=4), lost=True)
        await one.engine.say(removed(names_of(TOKENS, 16)[5:6]), lost=True)
        await one.heard()
        assert (one.blocks(), one.feed.counts.resets) == (5, 0)
        assert one.feed.counts.gaps >= 1


async def test_lost_last_message_is_found_in_silence() -> None:
    """Nothing that comes after it would show it."""
    async with rig(options={"silence_s": 0.05}) as one:
        await one.engine.say(stored(TOKENS, 16), lost=True)
        await one.until(lambda: one.blocks() == 10)


async def test_what_the_engine_no_longer_replays_is_forgotten_with_all_else() -> None:
    """Something may have been removed in between: nothing is credited that may be gone; what comes later counts again."""
    async with rig(buffer=2) as one:
        await one.engine.say(stored(TOKENS[:64], 16))
        await one.heard()
        assert one.blocks() == 4
        await one.engine.say(removed(names_of(TOKENS, 16)[:4]), lost=True)
        for _ in range(3):
            await one.engine.say(lost=True)
        await one.heard()
        assert (one.blocks(), one.feed.counts.resets) == (0, 1)
        await one.engine.say(stored(TOKENS, 16, first=4), stored(TOKENS[:64], 16))
        await one.heard()
        assert one.blocks() == 10


async def test_gap_without_replay_forgets_all() -> None:
    """An engine may be set up without a replay endpoint."""
    async with rig(options={"replay_endpoint": None}) as one:
        await one.engine.say(stored(TOKENS[:64], 16))
        await one.heard()
        await one.engine.say(lost=True)
        await one.heard()
        assert (one.blocks(), one.feed.counts.resets, one.feed.counts.replays) == (0, 1, 0)


async def test_repeated_late_and_reordered_messages_are_taken_once() -> None:
    """An old message must not bring back what has gone since."""
    async with rig() as one:
        first = await one.engine.say(stored(TOKENS[:64], 16), times=3)
        await one.engine.say(removed(names_of(TOKENS, 16)[2:4]))
        await one.engine.send(*first)
        await one.heard()
        assert (one.blocks(), one.feed.counts.old) == (2, 3)
        swapped = [await one.engine.say(stored(TOKENS[:64], 16), lost=True), await one.engine.say(CLEARED, lost=True)]
        for message in reversed(swapped):
            await one.engine.send(*message)
        await one.heard()
        assert (one.blocks(), one.feed.counts.resets) == (0, 0)


async def test_restarted_engine_begins_with_nothing() -> None:
    """Its numbers go back; what it held before is gone, what it has said since counts."""
    async with rig() as one:
        for _ in range(5):
            await one.engine.say(stored(TOKENS[:96], 16))
        await one.heard()
        assert one.blocks() == 6
        await one.engine.restart()
        await one.engine.say(stored(TOKENS[:32], 16))
        await one.listening()
        await one.heard()
        assert one.blocks() == 2
        assert one.feed.counts.resets >= 1


async def test_restarted_engine_that_has_passed_the_old_number_is_noticed() -> None:
    """A number that goes on from ours is no proof: the message before it must be the one we know."""
    async with rig(options={"silence_s": 0.05}) as one:
        await one.engine.say(stored(TOKENS[:96], 16))
        await one.heard()
        due = one.feed._order.next
        await one.engine.restart()
        await one.engine.say(stored(TOKENS[:32], 16), lost=True)
        for _ in range(due + 3):
            await one.engine.say(lost=True)
        await one.until(lambda: one.blocks() == 2)
        assert one.feed.counts.resets >= 1


async def test_silent_engine_that_does_not_answer_is_forgotten_when_it_speaks() -> None:
    """Nobody can say whether it is the same."""
    async with rig(options={"silence_s": 0.2, "replay_s": 0.05}) as one:
        await one.engine.say(stored(TOKENS[:64], 16))
        await one.until(lambda: one.blocks() == 4)
        one.engine._router.close(linger=0)
        await one.until(lambda: one.feed.counts.replay_failures > 0)
        assert one.blocks() == 4
        await one.engine.say(stored(TOKENS[64:96], 16))
        await one.until(lambda: one.blocks() == 0)


async def test_garbage_is_dropped_and_counted() -> None:
    """Of another version, cut, of another shape: the stream goes on."""
    async with rig() as one:
        await one.engine.say(payload=b"\xc1 no msgpack")
        await one.engine.say(payload=msgspec.msgpack.encode({"version": 99}))
        await one.engine.say({"type": "BlockTeleported", "to": "moon"}, ["BlockStored"], stored(TOKENS[:32], 16))
        await one.engine._pub.send_multipart([b"", b"odd"])
        await one.engine._pub.send_multipart([b"", b"odd", b"number"])
        await one.heard()
        assert (one.blocks(), one.feed.counts.malformed, one.feed.counts.unknown, one.feed.counts.resets) == (2, 4, 2, 0)


async def test_slow_listener_loses_nothing_for_good() -> None:
    """Messages wait in a bounded queue; what goes beyond is a gap, and had by replay, in parts if it is much."""
    async with rig() as one:
        filler = "x" * 2000
        for _ in range(4000):  # it gets no turn meanwhile
            one.engine.say_at_once({"type": "BlockTeleported", "to": filler})
        sequence, _ = await one.engine.say(stored(TOKENS, 16))
        await one.until(lambda: one.feed._order.next > sequence, saying=one.engine.say)  # it may still be too slow for one more
        assert (one.blocks(), one.feed.counts.unknown, one.feed.counts.resets) == (10, 4000, 0)
        assert one.feed.counts.gaps >= 1


def test_settings_that_cannot_work_are_refused() -> None:
    """At once, and saying why."""
    index: PrefixIndex[WorkerRef] = PrefixIndex()
    good: dict[str, Any] = {"endpoint": "tcp://h:1", "holder": ENGINE, "root": ROOT, "block_tokens": 16}
    bad: list[dict[str, Any]] = [
        {"endpoint": "tcp://*:1"},
        {"endpoint": "http://h:1"},
        {"replay_endpoint": "h:1"},
        {"root": b"short"},
        {"block_tokens": 0},
        {"silence_s": 0},
    ]
    for change in bad:
        with pytest.raises(ConfigError):
            VllmFeed(index, **(good | change))
