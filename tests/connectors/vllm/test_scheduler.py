"""What is looked up, loaded, saved and held, with stand-ins for vLLM's objects."""

from collections.abc import Callable
from typing import Any

import pytest

from kvpool.connectors.vllm.chains import keys_of
from kvpool.connectors.vllm.messages import SaveJob, StepPlan, StepReport
from kvpool.connectors.vllm.scheduler import Scheduler, Shape
from kvpool.connectors.vllm.settings import Settings
from kvpool.units import SECOND
from tests.connectors.vllm.engine import BLOCK, BlockPool, Pool, Request

ROOTS = [b"\1" * 32, b"\2" * 32]


class World:
    """A scheduler's side over a pool and an engine's blocks."""

    def __init__(self, roots: int = 1, **settings: Any) -> None:
        shape = {name: settings.pop(name) for name in list(settings) if name in Shape._fields}
        self.pool, self.blocks = Pool(), BlockPool()
        self.scheduler = Scheduler(Shape(BLOCK, ranks=roots, **shape), Settings(pool="a:1", **settings), lambda request: b"")
        self.scheduler.connect(self.pool, ROOTS[:roots], 100)
        self.scheduler.bind(self.blocks)
        self.now_ns = 0

    def hold(self, request: Request, count: int, root: int = 0) -> None:
        """The pool has the first blocks of a request."""
        self.pool.keys.update(keys_of(ROOTS[root], request.block_hashes[:count]))

    def step(self, *scheduled: tuple[Request, int], ids: Callable[[str], list[int]] = lambda _: list(range(1, 20))) -> StepPlan:
        self.now_ns += SECOND
        tokens = sum(count for _, count in scheduled)
        return self.scheduler.plan([(request.request_id, count) for request, count in scheduled], ids, tokens, self.now_ns)

    def saved(self, plan: StepPlan, ranks: int = 1) -> None:
        """All ranks have saved all of it."""
        for _ in range(ranks):
            self.scheduler.reported(StepReport(saved={job.number: [len(job.block_ids)] for job in plan.saves}), self.now_ns)


def request(count: int = 18, name: str = "r", **fields: Any) -> Request:
    return Request(name, list(range(100, 100 + count)), **fields)


def test_found_prefix_is_loaded_behind_what_the_engine_has() -> None:
    """The engine's own blocks come first; the load names the chain's blocks and the engine's."""
    world, one = World(), request()
    world.hold(one, 3)
    assert world.scheduler.match(one, BLOCK) == (2 * BLOCK, False)
    world.scheduler.allocated(one, [7, 8, 9, 10, 11], 2 * BLOCK)
    plan = world.step((one, 18))
    (load,) = plan.loads
    assert (load.first, load.block_ids, load.within_step) == (1, [8, 9], True)
    assert plan.names["r"] == one.block_hashes[:4]
    assert [(save.first, save.block_ids) for save in plan.saves] == [(3, [4])]


def test_one_token_is_left_to_compute() -> None:
    """A prompt that is all there must still be asked for its next token."""
    world, one = World(), request(4 * BLOCK)
    world.hold(one, 4)
    assert world.scheduler.match(one, 0) == (3 * BLOCK, False)
    assert world.scheduler.match(one, 3 * BLOCK) == (0, False)


def test_ranks_have_what_all_of_them_have() -> None:
    """One object in as many parts: the lookup is the least of them, and more ranks never load within a step."""
    world, one = World(roots=2), request()
    world.hold(one, 4, root=0)
    world.hold(one, 2, root=1)
    assert world.scheduler.match(one, 0) == (2 * BLOCK, True)


@pytest.mark.parametrize(("settings", "here", "beside"), [({}, True, False), ({}, False, True), ({"sync_bytes": 150}, True, True)])
def test_small_loads_from_this_host_are_for_the_step(settings: dict[str, Any], here: bool, beside: bool) -> None:
    """What takes a few ms isn't worth steps of its own; what may take long holds nobody up."""
    world, one = World(**settings), request()
    world.pool.here = here
    world.hold(one, 2)
    assert world.scheduler.match(one, 0) == (2 * BLOCK, beside)


def test_blocks_are_saved_as_they_get_full_and_held_until_all_ranks_are_done() -> None:
    """A chunked prefill, then decoding; a block is used once more until it has been read by each rank."""
    world, one = World(roots=2), request(10)
    world.scheduler.match(one, 0)
    first = world.step((one, 6))
    assert [(save.first, save.block_ids) for save in first.saves] == [(0, [1])]
    one.all_token_ids += [1, 2, 3]
    second = world.step((one, 13))
    assert [(save.first, save.block_ids) for save in second.saves] == [(1, [2, 3])]
    assert second.names["r"] == one.block_hashes[1:3]
    assert world.blocks.held == [1, 2, 3]
    assert world.scheduler.saving
    world.saved(first)
    assert world.blocks.held == [1, 2, 3]
    world.saved(first)
    world.saved(second, ranks=2)
    assert world.blocks.held == []
    assert not world.scheduler.saving


def test_blocks_the_engine_had_are_saved_when_the_pool_lost_them() -> None:
    """A decode elsewhere finds the prefix although the prefill took it from the engine's own cache."""
    world, one = World(), request()
    world.hold(one, 1)
    assert world.scheduler.match(one, 3 * BLOCK) == (0, False)
    assert [(save.first, save.block_ids) for save in world.step((one, 18)).saves] == [(1, [2, 3, 4])]


def test_finished_and_aborted_requests_leave_their_saves_alone() -> None:
    """What is being read stays as it is, whoever it was for; the ranks forget the names afterwards."""
    world, one = World(), request()
    world.scheduler.match(one, 0)
    plan = world.step((one, 18))
    world.scheduler.ended(one)
    assert world.blocks.held == [1, 2, 3, 4]
    assert world.step().ended == ["r"]
    world.saved(plan)
    assert world.blocks.held == []


def test_request_refused_before_admission_leaves_nothing() -> None:
    """Looked up, never allocated, aborted: no load, no name, no block."""
    world, one = World(), request()
    world.hold(one, 3)
    world.scheduler.match(one, 0)
    world.scheduler.ended(one)
    plan = world.step()
    assert (plan.loads, plan.names, plan.ended, world.blocks.held) == ([], {}, [], [])


def test_preempted_request_saves_no_block_twice() -> None:
    """It comes back with other blocks of the engine; the pool has the old ones' bytes."""
    world, one = World(), request()
    world.scheduler.match(one, 0)
    plan = world.step((one, 12))
    world.scheduler.match(one, 0)
    again = world.step((one, 18), ids=lambda _: list(range(20, 30)))
    assert [(save.first, save.block_ids) for save in again.saves] == [(3, [23])]
    world.saved(plan)
    world.saved(again)
    assert world.blocks.held == []


def test_short_load_is_not_tried_again_and_what_was_missing_is_saved() -> None:
    """Else a block that can't be read would be looked up and loaded for ever."""
    world, one = World(), request()
    world.hold(one, 3)
    world.scheduler.match(one, 0)
    world.scheduler.allocated(one, [1, 2, 3, 4], 3 * BLOCK)
    world.step((one, 18))
    world.scheduler.reported(StepReport(short={"r": 1}, failed_within=1), world.now_ns)
    assert world.scheduler.match(one, 0) == (0, False)
    plan = world.step((one, 18))
    assert plan.failures_seen == 1
    assert [(save.first, save.block_ids) for save in plan.saves] == [(1, [2, 3, 4])]


def test_saves_hold_back_a_share_of_the_engine_at_most() -> None:
    """A pool that takes nothing must not take the engine's memory; what is over is dropped and counted."""
    world, one, other = World(hold_share=0.125), request(), request(name="s")
    world.scheduler.match(one, 0)
    world.scheduler.match(other, 0)
    plan = world.step((one, 18), (other, 18), ids=lambda name: list(range(1, 5)) if name == "r" else list(range(5, 9)))
    assert [save.request_id for save in plan.saves] == ["r"]
    assert world.scheduler.counts()["dropped_blocks"] == 4


@pytest.mark.parametrize(
    ("params", "always", "waited"), [(None, False, False), ({"do_remote_decode": True}, False, True), (None, True, True)]
)
def test_hand_offs_are_waited_for(params: dict[str, Any] | None, always: bool, waited: bool) -> None:
    """Where another engine goes on, the answer must not come before the blocks are there: once, when the prompt ends."""
    world, one = World(always_hand_off=always), request(kv_transfer_params=params)
    world.scheduler.match(one, 0)
    assert world.step((one, 9)).hand_offs == []
    assert world.step((one, 18)).hand_offs == (["r"] if waited else [])
    one.all_token_ids.append(1)
    assert world.step((one, 19)).hand_offs == []


def test_roles_decide_what_is_done() -> None:
    """A consumer saves nothing; a producer loads nothing."""
    consumer, producer, one = World(saves=False), World(loads=False), request()
    for world in (consumer, producer):
        world.hold(one, 2)
    assert consumer.scheduler.match(one, 0) == (2 * BLOCK, False)
    assert consumer.step((one, 18)).saves == []
    assert producer.scheduler.match(one, 0) == (0, False)
    assert [(save.first, len(save.block_ids)) for save in producer.step((one, 18)).saves] == [(2, 2)]


def test_generated_tokens_are_left_out_when_not_wanted() -> None:
    """`save_decode: false`."""
    world, one = World(save_decode=False), request(12, num_prompt_tokens=6)
    world.scheduler.match(one, 0)
    assert [len(save.block_ids) for save in world.step((one, 12)).saves] == [1]


def test_requests_without_names_are_neither_looked_up_nor_saved() -> None:
    """Media without shared hashes: explicit, and counted."""
    world, one = World(by_hash=False), request(mm_features=[object()])
    assert world.scheduler.match(one, 0) == (0, False)
    assert world.step((one, 18)).saves == []
    assert (world.pool.asked, world.scheduler.counts()["unnamed_requests"]) == (0, 1)


def test_reset_makes_all_that_was_saved_unknown() -> None:
    """Weights may have changed: new requests look for other keys, those under way save nothing more."""
    world, one, other = World(), request(), request(name="s")
    world.hold(other, 4)
    world.scheduler.match(one, 0)
    world.scheduler.reset(b"era")
    assert world.step((one, 18)).saves == []
    assert world.scheduler.match(other, 0) == (0, False)
    (save,) = world.step((other, 18)).saves
    assert isinstance(save, SaveJob)
    assert len(save.block_ids) == 4


def test_stories_tell_of_blocks_that_all_ranks_saved() -> None:
    """An event says hash, parent and tokens; of a save that fell short nothing is said."""
    world, one = World(events=True), request()
    world.hold(one, 1)
    world.scheduler.match(one, 0)
    world.saved(world.step((one, 12)))
    (story,) = world.scheduler.stories
    assert (story.parent, story.hashes) == (one.block_hashes[0], one.block_hashes[1:3])
    assert story.tokens == one.all_token_ids[BLOCK : 3 * BLOCK]
    plan = world.step((one, 18))
    world.scheduler.reported(StepReport(saved={plan.saves[0].number: [0]}), world.now_ns)
    assert len(world.scheduler.stories) == 1
