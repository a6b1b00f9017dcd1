"""The scheduler with a target for the time between tokens: answers keep it, prompts get through, and cuts stay where they may be."""

import asyncio
import itertools
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from kvpool.engine.engine import Engine
from kvpool.engine.paged.blocks import BlockManager
from kvpool.engine.schedule.scheduler import Scheduler
from kvpool.engine.schedule.work import State, Turn, Work
from kvpool.engine.settings import EngineSettings
from kvpool.engine.store import NullStore
from kvpool.errors import ConfigError
from kvpool.policy.pace import LONGEST, PARTS
from kvpool.request import DecodeRequest, TokenOut
from kvpool.units import MS

CHUNK = 64
PART = CHUNK // PARTS
TARGET_NS = 40 * MS
EngineMaker = Callable[..., AbstractAsyncContextManager[Engine]]


class Worker:
    """A scheduler whose passes take `step_ns` and `row_ns` for each token, on a clock of its own."""

    def __init__(self, target_ns: int, step_ns: int = 10 * MS, row_ns: int = MS) -> None:
        manager = BlockManager(capacity=4096, block_tokens=4, keep=0)
        self.scheduler = Scheduler(manager, max_active=64, max_queued=64, chunk_tokens=CHUNK, target_ns=target_ns)
        self.step_ns, self.row_ns, self.now_ns = step_ns, row_ns, 0
        self.made: dict[Work, list[int]] = {}
        """When each work's tokens were there, its first one included."""

    def submit(self, prompt: int, answer: int) -> Work:
        work = Work(keys=(), known=prompt, usable=prompt - 1, limit=prompt + answer - 1)
        self.scheduler.submit(work)
        self.made[work] = []
        return work

    def step(self) -> list[Turn]:
        plan = self.scheduler.plan(self.now_ns)
        for work in plan.admitted:
            self.scheduler.loaded(work, 0)
        took_ns = self.step_ns + self.row_ns * sum(turn.end - turn.start for turn in plan.turns) if plan.turns else 0
        self.now_ns += took_ns
        for turn in self.scheduler.done(took_ns):
            if turn.last:
                turn.work.known += 1
                self.made[turn.work].append(self.now_ns)
                if turn.work.known > turn.work.limit:
                    self.scheduler.leave(turn.work)
                    self.scheduler.retired()
        return plan.turns

    def gaps(self, work: Work) -> list[int]:
        return [b - a for a, b in itertools.pairwise(self.made[work])]


def serve(target_ns: int, answers: int = 6) -> tuple[Worker, list[Work], list[list[Turn]]]:
    """Answers of 40 tokens, and prompts of 300 beside them for as long as there are answers. The worker has served before."""
    worker = Worker(target_ns)
    worker.submit(200, 3)
    while worker.scheduler.active or worker.scheduler.waiting:
        worker.step()
    works = [worker.submit(3, 40) for _ in range(answers)]
    while any(work.pending > 1 for work in works):
        worker.step()
    passes = []
    while any(work.state is not State.GONE for work in works):
        while len(worker.scheduler.waiting) < 2:
            worker.submit(300, 1)
        passes.append(worker.step())
    return worker, works, passes


def test_answers_keep_the_target_while_prompts_take_all_the_rest() -> None:
    """The mean of each is below the target and near it, no gap is above the bound; without a target all are twice too slow."""
    worker, works, _ = serve(TARGET_NS)
    for work in works:
        gaps = worker.gaps(work)
        assert 0.8 * TARGET_NS < sum(gaps) / len(gaps) <= TARGET_NS
        assert max(gaps) <= LONGEST * TARGET_NS
    free, others, _ = serve(0)
    assert all(sum(gaps := free.gaps(work)) / len(gaps) > 1.8 * TARGET_NS for work in others)


def test_prompts_are_cut_at_multiples_of_a_part_and_whole_chunks_when_nobody_answers() -> None:
    """Cuts depend on who else is there, but not on where a prefix ends; alone a prompt is cut as without a target."""
    _, _, passes = serve(TARGET_NS)
    turns = [turn for turns in passes for turn in turns if turn.end - turn.start > 1]
    assert turns
    assert all(turn.end % PART == 0 or turn.end == turn.work.known for turn in turns)
    assert all(turn.start // CHUNK == (turn.end - 1) // CHUNK for turn in turns)
    alone = Worker(TARGET_NS)
    alone.submit(200, 1)
    assert [(turn.start, turn.end) for _ in range(5) for turn in alone.step()] == [(0, 64), (64, 128), (128, 192), (192, 200)]


def test_prompts_move_on_where_steps_alone_miss_the_target() -> None:
    """A part in each pass, at the target of nobody."""
    worker = Worker(5 * MS)
    answer = worker.submit(3, 200)
    while answer.pending > 1 or not worker.made[answer]:
        worker.step()
    prompt, passes = worker.submit(300, 1), 0
    while prompt.state is not State.GONE:
        passes += bool(worker.step())
    assert passes <= 300 // PART + 2


def test_answer_that_paused_begins_anew() -> None:
    """Whoever's reader was away is not owed the tokens of that time: prompts would stand still for them."""
    worker = Worker(TARGET_NS)
    answer = worker.submit(3, 200)
    while not worker.made[answer]:
        worker.step()
    for _ in range(5):
        worker.step()
    answer.paused = True
    worker.step()
    worker.now_ns += 1000 * TARGET_NS
    answer.paused = False
    worker.submit(300, 1)
    worker.step()
    assert max(turn.end - turn.start for turn in worker.step()) > PART


@pytest.mark.parametrize("seed", range(4))
def test_without_a_target_nothing_is_measured_and_passes_are_the_same(seed: int) -> None:
    """0 is off: however long passes take, and a target that is never near changes nothing either."""
    plans = []
    for target_ns, row_ns in ((0, MS), (0, 1000 * MS), (10**9 * MS, MS)):
        rng, worker, turns = random.Random(seed), Worker(target_ns, row_ns=row_ns), list[list[tuple[int, int, int]]]()
        for _ in range(80):
            if rng.random() < 0.3:
                worker.submit(rng.randrange(1, 200), rng.randrange(1, 20))
            turns.append([(turn.work.order, turn.start, turn.end) for turn in worker.step()])
        plans.append(turns)
    assert plans[0] == plans[1] == plans[2]


@pytest.mark.parametrize(
    ("settings", "hint"), [({"tpot_target_ms": -1.0}, "at least 0"), ({"tpot_target_ms": 1.0, "steady": True}, "leave")]
)
def test_targets_that_cannot_be_are_refused(settings: dict[str, object], hint: str) -> None:
    """Cuts that depend on company aren't deterministic."""
    with pytest.raises(ConfigError, match=hint):
        EngineSettings(**settings)  # type: ignore[arg-type]


async def test_engine_with_a_target_gives_the_same_tokens(
    engine_of: EngineMaker, prompts: Callable[..., tuple[int, ...]], greedy: Callable[[tuple[int, ...], int], list[int]]
) -> None:
    """A target that no pass can keep cuts prompts into the smallest parts; the tokens are those of `transformers`."""
    asked = [prompts(length, seed=length) for length in (3, 50, 5, 90, 33)]
    async with engine_of(NullStore(), tpot_target_ms=0.001) as engine:

        async def answer(prompt: tuple[int, ...]) -> list[int]:
            request = DecodeRequest(request_id="d", prompt=prompt, generated=(), max_tokens=16)
            return [event.token async for event in engine.decode(request) if isinstance(event, TokenOut)]

        assert await asyncio.gather(*map(answer, asked)) == [greedy(prompt, 16) for prompt in asked]
