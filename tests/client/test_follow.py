"""The connection that feeds a feed: what breaks it, what is asked for afterwards, and how long it waits."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import cast

import pytest

from kvpool.block import BlockKey
from kvpool.client.feed import NodeFeed, follow
from kvpool.errors import ConfigError, KvpoolError, RemoteError, UnavailableError
from kvpool.request.events import DRAM, EventBatch
from kvpool.wire.events_client import EventsRpc

Script = list[EventBatch | KvpoolError]


def part(sequence: int, name: str = "", *, incarnation: int = 1, last: bool = True) -> EventBatch:
    blocks = tuple((BlockKey(letter.encode() * 32), None, 0, DRAM) for letter in name)
    return EventBatch(incarnation=incarnation, after=sequence, sequence=sequence, stored=blocks, part=1, last=last)


def change(after: int, sequence: int, name: str = "") -> EventBatch:
    blocks = tuple((BlockKey(letter.encode() * 32), None, 0, DRAM) for letter in name)
    return EventBatch(incarnation=1, after=after, sequence=sequence, stored=blocks)


class Line:
    """Connections that say what is scripted, one script each; then everything is over (`ConfigError`)."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.asked: list[tuple[int, int]] = []
        self.closed = 0

    def connect(self) -> EventsRpc:
        return cast(EventsRpc, self)

    async def watch(self, incarnation: int, sequence: int, patience_s: float) -> AsyncGenerator[EventBatch, None]:
        self.asked.append((incarnation, sequence))
        for one in self.scripts.pop(0) if self.scripts else [ConfigError("the script is over")]:
            if isinstance(one, KvpoolError):
                raise one
            yield one

    async def close(self) -> None:
        self.closed += 1


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses that were made; none takes any time."""
    made: list[float] = []

    async def sleep(seconds: float) -> None:
        made.append(seconds)

    monkeypatch.setattr("asyncio.sleep", sleep)
    return made


async def run(line: Line, feed: NodeFeed, on_error: Callable[[RemoteError], None] = lambda error: None) -> list[EventBatch]:
    """All that `follow` gives until the script is over."""
    given: list[EventBatch] = []

    async def iterate() -> None:
        async with aclosing(follow(feed, line.connect, on_error=on_error)) as batches:
            async for batch in batches:
                given.append(batch)  # noqa: PERF401

    with pytest.raises(ConfigError, match="script is over"):
        await iterate()
    assert line.closed == len(line.asked)
    return given


async def test_broken_stream_goes_on_where_the_feed_is(pauses: list[float]) -> None:
    """What was taken in is not asked for again; a snapshot that was cut off is."""
    errors: list[RemoteError] = []
    gone = UnavailableError("gone")
    line = Line([part(3, "a", last=False), gone], [part(4, "a"), change(4, 6, "b"), gone], [change(6, 6), change(6, 7, "c")])
    feed = NodeFeed()
    await run(line, feed, errors.append)
    assert line.asked == [(0, 0), (1, 0), (1, 6), (1, 7)]
    assert (len(feed), errors) == (3, [gone, gone])
    assert len(pauses) == 3


async def test_gap_is_not_taken_in_but_asked_for(pauses: list[float]) -> None:
    """A keep-alive that is ahead of the feed shows that something was lost on the way."""
    line = Line([part(3, "a"), change(5, 5), change(3, 5, "x")], [change(3, 5, "b")])
    feed = NodeFeed()
    await run(line, feed)
    assert line.asked == [(0, 0), (1, 3), (1, 5)]
    assert {one[0][:1] for one in feed.blocks()} == {b"a", b"b"}


async def test_pauses_grow_to_a_limit_and_start_over_once_something_came(pauses: list[float]) -> None:
    """A node that is down is not hammered, and one that is back is met soon."""
    dead: Script = [UnavailableError("down")]
    await run(Line(*[dead] * 9, [part(1)], dead), NodeFeed())
    for pause, full in zip(pauses, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 0.1, 0.2], strict=True):
        assert full / 2 <= pause <= full


async def test_node_whose_clock_was_set_back_is_followed_all_the_same(pauses: list[float]) -> None:
    """Old news on one connection is old; the first word of a new connection is not."""
    feed = NodeFeed()
    await run(Line([part(9, "ab", incarnation=50)], [part(2, "c", incarnation=40)]), feed)
    assert (feed.incarnation, feed.sequence, len(feed), feed.complete) == (40, 2, 1, True)


async def test_only_what_was_taken_in_is_given(pauses: list[float]) -> None:
    """Who iterates sees each change once, whatever is repeated."""
    given = await run(Line([part(3, "a"), part(3, "a"), change(3, 4, "b"), change(3, 4, "b"), change(4, 4)]), NodeFeed())
    assert [(batch.part, batch.sequence) for batch in given] == [(1, 3), (0, 4), (0, 4)]


async def test_more_blocks_than_a_feed_takes_end_it(pauses: list[float]) -> None:
    """Trying again would not help."""
    with pytest.raises(ConfigError, match="max_blocks"):
        async with aclosing(follow(NodeFeed(max_blocks=1), Line([part(3, "ab")]).connect)) as batches:
            await anext(batches)
