"""What a session's writes mean where there is a slower tier."""

import asyncio

from kvpool.pool.flow import FlowSettings
from kvpool.request.pool import Outcome, Reservation
from tests.node.conftest import LENGTH, SIZE, Rig, Rigs, chain, until

EXISTS, GRANTED, NO_SPACE = Outcome.EXISTS, Outcome.GRANTED, Outcome.NO_SPACE


def blocks(name: str, count: int) -> list[Reservation]:
    keys = chain(name, count)
    return [Reservation(key, keys[i - 1] if i else b"", 16 * i, LENGTH) for i, key in enumerate(keys)]


def put(rig: Rig, name: str, count: int) -> list[Outcome]:
    """A slab, written and published by one call."""
    slab = rig.handler.slab("s", 10**9, count * SIZE)
    assert slab is not None
    for i, block in enumerate(blocks(name, count)):
        rig.arena.view(slab.offset + i * SIZE, LENGTH)[:] = block.key[0]
    return rig.handler.put(slab.lease_id, blocks(name, count), sequence=0, tenant="")


async def test_blocks_from_a_slab_are_written_down(rigs: Rigs) -> None:
    """The tier below hears of them as of any others."""
    rig = rigs(8, below=8)
    assert put(rig, "a", 3) == [GRANTED] * 3
    assert rig.below is not None
    below = rig.below
    await until(lambda: all(below.find(chain("a", 3))))
    await until(lambda: not any(view.dirty for key in chain("a", 3) if (view := rig.state.view(key)) is not None))


async def test_block_that_the_tier_below_has_exists_and_is_not_written_down_again(rigs: Rigs) -> None:
    """Its writer is done; its bytes are here already, so they stay for the next reader, clean."""
    rig = rigs(8, below=8)
    assert rig.below is not None
    below = rig.below
    assert put(rig, "a", 2) == [GRANTED] * 2
    await until(lambda: all(below.find(chain("a", 2))))
    assert rig.state.discard(chain("a", 2)[1])
    puts = below.books().counters["puts"]
    assert put(rig, "a", 2) == [EXISTS, EXISTS]
    view = rig.state.view(chain("a", 2)[1])
    assert view is not None
    assert not view.dirty
    assert put(rig, "b", 1) == [GRANTED]
    await until(lambda: all(below.find(chain("b", 1))))
    assert below.books().counters["puts"] == puts + 1
    lease_id, grants, _ = rig.handler.reserve_now("s", 10**9, blocks("a", 2), sequence=0, tenant="", near=False)
    assert (lease_id, [outcome for outcome, _ in grants]) == (0, [EXISTS, EXISTS])
    rig.state.check()


async def test_what_would_have_to_wait_says_so_and_does_not(rigs: Rigs) -> None:
    """Blocks that are not written down yet keep their places; the caller may wait elsewhere, this call doesn't."""
    rig = rigs(4, below=8, settings=FlowSettings(write="through"))
    assert put(rig, "a", 4) == [GRANTED] * 4
    lease_id, grants, waiting = rig.handler.reserve_now("s", 10**9, blocks("b", 1), sequence=0, tenant="", near=False)
    assert (lease_id, grants, waiting) == (0, [(NO_SPACE, 0)], True)
    assert rig.handler.slab("s", 10**9, SIZE) is None
    assert rig.below is not None
    below = rig.below
    await until(lambda: all(below.find(chain("a", 4))))
    async with asyncio.timeout(20):
        while True:
            lease_id, grants, waiting = rig.handler.reserve_now("s", 10**9, blocks("b", 1), sequence=0, tenant="", near=False)
            if lease_id:
                break
            await asyncio.sleep(0.001)
    assert ([outcome for outcome, _ in grants], waiting) == ([GRANTED], False)
    rig.state.release(lease_id, 0)
