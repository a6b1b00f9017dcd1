"""Links and decode nodes by hand."""

import pytest

from kvpool.replay.sim import Fate, SimRequest, World
from kvpool.replay.sim.decode import DecodeNode
from kvpool.replay.sim.links import Links


def test_transfers_of_one_kind_queue_and_kinds_share() -> None:
    """100 bytes a second: two reads of 100 end at 1 and 2; a read during a hand-off has half the link."""
    links = Links(3, 100.0)
    assert links.transfer({0: 100.0}, 1, 0.0, read=True) == pytest.approx(1.0)
    assert links.transfer({0: 100.0}, 2, 0.0, read=True) == pytest.approx(2.0)
    other = Links(3, 100.0)
    other.transfer({0: 1000.0}, 2, 0.0, read=False)
    assert other.transfer({0: 100.0}, 1, 0.0, read=True) == pytest.approx(2.0)


def test_several_sources_are_bound_by_the_receiver_and_nothing_moves_to_oneself() -> None:
    """Two sources send at once, but one link takes it all in."""
    links = Links(3, 100.0)
    assert links.transfer({0: 100.0, 1: 100.0, 2: 500.0}, 2, 5.0, read=True) == pytest.approx(7.0)
    assert links.backlog_s(2, 5.0) == pytest.approx(2.0)
    assert links.transfer({2: 500.0}, 2, 9.0, read=True) == 9.0


def fate(name: str, prompt: int, answer: int) -> Fate:
    return Fate(SimRequest(name, 0.0, prompt, answer, ()))


def test_all_answers_get_a_token_a_step_and_leave_when_complete() -> None:
    """Two answers of 10 and 20 tokens begin together: the second ends ten shorter steps after the first."""
    world = World()
    node, short, long = DecodeNode(world), fate("s", 1000, 10), fate("l", 1000, 20)
    node.add(short, 0.0)
    node.add(long, 0.0)
    first = node.next_s(0.0)
    assert first == pytest.approx(10 * world.step_s(2030))
    assert first is not None
    assert node.through(first) == [short]
    last = node.next_s(first)
    assert last == pytest.approx(first + 10 * world.step_s(1020))
    assert last is not None
    assert node.through(last) == [long]
    assert (node.active, node.tokens, node.next_s(last)) == (0, 0, None)


def test_answer_without_room_waits_for_it() -> None:
    """KV is reserved before the first step."""
    world = World()
    node = DecodeNode(world)
    node.add(fate("a", world.decode_tokens - 100, 50), 0.0)
    node.add(fate("b", 1000, 50), 0.0)
    assert (node.active, node.waiting) == (2, 1)
    end = node.next_s(0.0)
    assert end is not None
    node.through(end)
    assert (node.active, node.waiting) == (1, 0)
