"""The scheduler: what a pass is made of, who comes next, who gives way, and that everybody gets through."""

import random

import pytest

from kvpool.block import chain_keys
from kvpool.engine.paged.blocks import BlockManager
from kvpool.engine.schedule.scheduler import OverloadedError, Plan, Scheduler
from kvpool.engine.schedule.work import NEVER_NS, State, Work
from kvpool.errors import ConfigError, LocalError
from kvpool.policy.order import AGING

SIZE, CHUNK = 4, 16
ROOT = bytes(32)


def scheduler_of(capacity: int = 64, keep: int = 64, **bounds: int) -> Scheduler:
    manager = BlockManager(capacity=capacity, block_tokens=SIZE, keep=keep)
    return Scheduler(manager, **{"max_active": 8, "max_queued": 64, "chunk_tokens": CHUNK, **bounds})


def work_of(tokens: int, limit: int = 0, seed: int = 0, deadline_ns: int = NEVER_NS) -> Work:
    """A prompt of `tokens` tokens; prompts of one seed share their beginnings."""
    prompt = random.Random(seed).choices(range(1000), k=200)[:tokens]
    keys = tuple(chain_keys(ROOT, prompt, SIZE))
    return Work(keys=keys, known=tokens, usable=tokens - 1, limit=limit or tokens + 8, deadline_ns=deadline_ns)


def step(scheduler: Scheduler, now_ns: int = 0) -> Plan:
    """One pass: whoever is admitted finds nothing elsewhere, and whoever reaches its end gets a token."""
    plan = scheduler.plan(now_ns)
    for work in plan.admitted:
        scheduler.loaded(work, work.table.tokens)
    for turn in scheduler.done():
        for index, key in enumerate(turn.work.keys[: turn.end // SIZE]):
            scheduler.manager.name(key, turn.work.table.blocks[index], SIZE)
        if turn.last:
            turn.work.known += 1
            if turn.work.known > turn.work.limit:
                scheduler.leave(turn.work)
                scheduler.retired()
    return plan


def sizes(plan: Plan) -> list[int]:
    return [turn.end - turn.start for turn in plan.turns]


def test_pass_mixes_every_decode_with_one_chunk() -> None:
    """Continuous batching and chunked prefill: a long prompt doesn't stop the others, nor they it."""
    scheduler = scheduler_of()
    short = [work_of(3, limit=40, seed=i) for i in range(3)]
    for work in short:
        scheduler.submit(work)
    assert sizes(step(scheduler)) == []  # admitted: what there is is being fetched
    assert sizes(step(scheduler)) == [3, 3, 3]
    scheduler.submit(work_of(50, limit=60, seed=9))
    step(scheduler)
    assert [sizes(step(scheduler)) for _ in range(5)] == [[1, 1, 1, 16]] * 3 + [[1, 1, 1, 2]] + [[1, 1, 1, 1]]


def test_chunks_are_cut_at_absolute_multiples_wherever_the_prefix_ends() -> None:
    """So the same tail of a prompt is computed in the same pieces, and gives the same bits."""
    scheduler = scheduler_of()
    first = work_of(24, limit=24)
    scheduler.submit(first)
    while first.state is not State.GONE:
        step(scheduler)
    again = work_of(60)
    scheduler.submit(again)
    turns = [(turn.start, turn.end) for _ in range(5) for turn in step(scheduler).turns]
    assert turns[:4] == [(24, 32), (32, 48), (48, 60), (60, 61)]


def test_least_left_to_compute_comes_first_and_what_is_here_is_no_work() -> None:
    """Shortest remaining first, which makes it cache-aware: of a long prompt that is here already little is left."""
    scheduler = scheduler_of(max_active=1)
    scheduler.submit(before := work_of(40, limit=40))
    while before.state is not State.GONE:
        step(scheduler)
    works = {"long": work_of(60, seed=1), "short": work_of(12, seed=2), "warm": work_of(44, limit=44)}
    for work in works.values():
        scheduler.submit(work)
    served = []
    while scheduler.waiting or scheduler.active:
        served += step(scheduler).admitted
    assert served == [works["warm"], works["short"], works["long"]]


def test_short_prompt_passes_a_long_one_that_has_begun() -> None:
    """It waits for the pass that runs; then what is left of each counts, not who came first."""
    scheduler = scheduler_of()
    scheduler.submit(long := work_of(70, limit=70, seed=1))
    step(scheduler)
    step(scheduler)
    scheduler.submit(short := work_of(20, limit=20, seed=2))
    step(scheduler)
    turns = [[(turn.work, turn.end) for turn in step(scheduler).turns] for _ in range(4)]
    assert turns == [[(short, 16)], [(short, 20)], [(long, 48)], [(long, 64)]]


def test_prompt_with_least_left_comes_first_though_it_is_the_longest() -> None:
    """What counts is what is left: who is nearly through isn't passed by half as long a newcomer."""
    scheduler = scheduler_of()
    scheduler.submit(long := work_of(70, limit=70, seed=1))
    for _ in range(4):
        step(scheduler)
    scheduler.submit(work_of(20, limit=20, seed=2))
    step(scheduler)
    assert long.pending == 6
    assert [(turn.work, turn.end) for turn in step(scheduler).turns] == [(long, 70)]


@pytest.mark.parametrize("places", [1, 8])
def test_stream_of_short_prompts_delays_a_long_one_by_less_than_the_bound(places: int) -> None:
    """Shortest first starves without aging: short ones never end here, and fill the worker by themselves."""
    scheduler = scheduler_of(capacity=256, keep=0, max_active=places, max_queued=8)
    long, most, computed, seed = work_of(90, limit=90, seed=1), places + 8, 0, 1
    scheduler.submit(long)
    while long.state is not State.GONE:
        while len(scheduler.waiting) < 8 and len(scheduler.waiting) + scheduler.active < most:
            seed += 1
            scheduler.submit(work_of(12, limit=12, seed=seed))
        turns = step(scheduler).turns
        computed += sum(turn.end - turn.start for turn in turns if turn.work is not long)
        assert computed < (1 / AGING + most) * long.known
    assert computed > long.known / AGING / 2  # passed it was


def test_last_comer_gives_way_and_the_first_never_does() -> None:
    """Preemption: in order of arrival, and whoever was preempted comes back before who never came."""
    scheduler = scheduler_of(capacity=8, keep=0)
    works = [work_of(8, limit=24, seed=i) for i in range(3)]
    for work in works:
        scheduler.submit(work)
    preempted = 0
    while works[0].state is not State.GONE:
        active = sorted(scheduler.works(), key=lambda work: work.order)
        victims = step(scheduler).preempted
        assert victims == active[len(active) - len(victims) :][::-1]
        assert works[0] not in victims
        preempted += len(victims)
    assert preempted == scheduler.preemptions > 0
    while any(work.state is not State.GONE for work in works):
        step(scheduler)
    scheduler.manager.audit([])


def test_cancelled_amid_a_pass_keeps_its_blocks_until_the_pass_is_done() -> None:
    """The pass writes to them; the next plan knows the work no more."""
    scheduler = scheduler_of()
    scheduler.submit(work := work_of(10))
    step(scheduler)
    plan = scheduler.plan(0)
    assert scheduler.leave(work)
    assert scheduler.manager.held
    with pytest.raises(LocalError, match="a pass is running"):
        scheduler.plan(0)
    assert (sizes(plan), scheduler.done(), scheduler.manager.held, scheduler.active) == ([10], [], 0, 1)
    assert not scheduler.leave(work)
    scheduler.retired()
    assert (scheduler.plan(0).turns, scheduler.active) == ([], 0)


def test_deadline_of_who_waits_is_kept() -> None:
    """A request that can't be begun in time is told so; one that has begun goes on."""
    scheduler = scheduler_of(max_active=1)
    scheduler.submit(begun := work_of(10, deadline_ns=5))
    step(scheduler)
    scheduler.submit(late := work_of(10, deadline_ns=5))
    assert step(scheduler, 4).expired == []
    assert step(scheduler, 5).expired == [late]
    assert (begun.state, late.state) == (State.READY, State.GONE)


def test_bounds_are_told() -> None:
    """More than may wait, or more than there is: both at once, with the reason."""
    scheduler = scheduler_of(capacity=8, max_active=2, max_queued=1)
    for _ in range(3):
        scheduler.submit(work_of(4, limit=4))
    with pytest.raises(OverloadedError, match="0 requests are active and 3 wait"):
        scheduler.submit(work_of(4, limit=4))
    with pytest.raises(ConfigError, match="raise --kv-memory"):
        scheduler.submit(work_of(4, limit=33))
    with pytest.raises(ConfigError, match="at least one active"):
        scheduler_of(max_active=0)


@pytest.mark.parametrize("seed", range(12))
def test_everybody_gets_through_whatever_the_room(seed: int) -> None:
    """64 requests, room for a few, cancellations, blocks held by pushes for a while: no deadlock, no block lost, bounded passes.

    Every other time with a target that can't be kept.
    """
    rng = random.Random(seed)
    bounds = {"max_active": rng.randrange(1, 12), "target_ns": seed % 2}
    scheduler = scheduler_of(capacity=rng.randrange(14, 40), keep=rng.choice((0, 6, 40)), **bounds)
    manager = scheduler.manager
    works = [work_of(rng.randrange(1, 40), limit=48, seed=rng.randrange(4)) for _ in range(64)]
    waiting, holds = list(works), list[tuple[int, list[int]]]()
    for tick in range(20000):
        if waiting and len(scheduler.waiting) < 10:
            scheduler.submit(waiting.pop())
        there = [work for work in works if work.state in (State.READY, State.WAITING) and work.order]
        if there and rng.random() < 0.01 and scheduler.leave(rng.choice(there)):
            scheduler.retired()
        plan = step(scheduler, tick)
        assert len(plan.turns) <= scheduler.max_active
        assert sum(turn.end - turn.start for turn in plan.turns if turn.end - turn.start > 1) <= CHUNK
        for turn in plan.turns[:1]:
            if rng.random() < 0.2 and turn.work.state is State.READY:
                holds.append((tick + 20, manager.hold(turn.work.table.blocks[:1])))
        while holds and holds[0][0] <= tick:
            manager.let_go(holds.pop(0)[1])
        if tick % 50 == 0:
            manager.audit([*(work.table.blocks for work in scheduler.works()), *(blocks for _, blocks in holds)])
        if not waiting and all(work.state is State.GONE for work in works):
            break
    assert all(work.state is State.GONE for work in works)
    assert scheduler.active == 0
