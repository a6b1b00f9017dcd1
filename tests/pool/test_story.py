"""The story of a key: told in errors, bounded in memory."""

from hashlib import sha256

from kvpool.block import BlockKey
from kvpool.pool.story import Story

A, B = (BlockKey(sha256(name).digest()) for name in (b"a", b"b"))


def test_story_tells_one_keys_events_in_order() -> None:
    """An invariant error must say how the block got there."""
    story = Story(100)
    story.record(1, "reserved", 7, (A, B))
    story.record(2, "committed", 7, (A,))
    story.record(3, "evict", 0, (B,))
    assert story.of(A) == ["1 ns: reserved (lease 7)", "2 ns: committed (lease 7)"]
    message = str(story.error("is lost", B))
    assert message.startswith(f"block {B.hex()}: is lost; its story:")
    assert "3 ns: evict" in message


def test_story_forgets_the_oldest_beyond_its_bound() -> None:
    """History must not grow with traffic, nor one huge call push memory up."""
    story = Story(10)
    for now in range(100):
        story.record(now, "acquired", 1, (A, B))
    assert story.of(A) == [f"{now} ns: acquired (lease 1)" for now in (97, 98, 99)]
    story.record(100, "acquired", 1, (A,) * 1000)
    assert story.of(A) == []
    assert "nothing remembered" in str(story.error("is lost", A))
