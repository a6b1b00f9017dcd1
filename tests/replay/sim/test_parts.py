"""Links and decode nodes by hand."""

from itertools import pairwise

import pytest

from kvpool.policy.pace import LONGEST
from kvpool.policy.routing import Ask, Candidate, Scored, WorkerOrder, WorkerRef
from kvpool.replay.sim import Fate, SimRequest, World
from kvpool.replay.sim.decode import DecodeNode
from kvpool.replay.sim.links import Links
from kvpool.replay.sim.prefill import Job


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


def guest(node: DecodeNode, name: str, prompt: int) -> Job:
    """A prompt without a context that is to be prefilled on `node`."""
    job = Job(fate(name, prompt, 1), Ask(name, prompt), Scored(Candidate(WorkerRef("decode", "0", 1)), 0.0, ()), 0.0, context=0)
    node.guests.expect(job)
    node.invite(job, 0.0)
    return job


def drive(node: DecodeNode, until: list[Job], answers: int) -> tuple[list[Fate], dict[str, float], list[float]]:
    """Until all answers and guests are through: the answers, when each guest was, and when passes or steps were looked at."""
    now, ended, guests, looks = 0.0, list[Fate](), dict[str, float](), [0.0]
    node.go_on(now)
    while len(ended) < answers or len(guests) < len(until):
        when = node.next_s(now)
        assert when is not None
        now = when
        looks.append(now)
        ended += node.through(now)
        guests |= {job.fate.request.request_id: now for job in node.guest(now)[1]}
        node.go_on(now)
    return ended, guests, looks


def test_guests_beside_answers_leave_them_their_time_between_tokens() -> None:
    """A prompt of 60,000 tokens beside ten answers: each within the SLO and near it; no pass is longer than the bound."""
    world = World()
    node = DecodeNode(world, WorkerOrder.SHORTEST)
    for number in range(10):
        node.add(fate(str(number), 5000, 100 + number), 0.0)
    job = guest(node, "guest", 60_000)
    ended, through, looks = drive(node, [job], 10)
    assert all(0.9 * world.tbt_slo_s < answer.step_s <= world.tbt_slo_s for answer in ended)
    assert max(b - a for a, b in pairwise(looks)) <= LONGEST * world.tbt_slo_s
    assert through["guest"] > world.prefill_s(60_000)
    assert job.done == job.prompt
    assert job.compute_s == pytest.approx(through["guest"])


def test_guests_alone_have_the_node_for_themselves_and_small_ones_share_a_pass() -> None:
    """Without answers a guest takes what it takes on a prefill node; five of 100 tokens are through with the first pass."""
    world = World()
    node = DecodeNode(world, WorkerOrder.SHORTEST)
    assert drive(node, [guest(node, "alone", 10_000)], 0)[1]["alone"] == pytest.approx(world.prefill_s(10_000))
    node = DecodeNode(world, WorkerOrder.SHORTEST)
    node.add(fate("answer", 1000, 50), 0.0)
    through = drive(node, [guest(node, str(number), 100) for number in range(5)], 1)[1]
    assert list(through.values()) == pytest.approx([world.step_s(1050) + 5 * world.prefill_s(100)] * 5)


def test_answer_that_comes_during_a_pass_has_nothing_of_it_and_waits_for_its_end() -> None:
    """It gets its tokens from the next pass on, and the wait counts."""
    world = World()
    node = DecodeNode(world, WorkerOrder.SHORTEST)
    guest(node, "guest", 1000)
    node.go_on(0.0)
    end = node.next_s(0.0)
    assert end == pytest.approx(world.prefill_s(1000))
    assert end is not None
    late = fate("late", 1000, 1)
    node.add(late, end / 2)
    assert node.through(end) == []
    assert [job.fate.request.request_id for job in node.guest(end)[1]] == ["guest"]
    node.go_on(end)
    through = node.next_s(end)
    assert through == pytest.approx(end + world.step_s(1001))
    assert through is not None
    assert node.through(through) == [late]
    assert late.step_s == pytest.approx(through - end / 2)
