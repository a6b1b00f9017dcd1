"""What a real engine says of its memory, and what a router makes of it."""

import asyncio

from kvpool.clock import MonotonicClock
from kvpool.engine.engine import Engine
from kvpool.engine.model import Model
from kvpool.engine.store import MemoryStore, NullStore
from kvpool.policy.routing import Candidate
from kvpool.request import PrefillRequest, Sampling
from kvpool.wire.channel import bind, make_server
from kvpool.wire.events_client import EventsRpc
from kvpool.wire.events_server import add_events
from router.assemble import build_dispatcher
from router.feeds.members import EVENTS_INFO, MemberFeeds
from router.job import Job
from router.need import Need
from router.probe import NoPool
from router.settings import Limits
from router.testing.cluster import ScriptedCluster
from tests.engine.test_engine import BLOCK, EngineMaker, Prompts

KEEP = 8


async def prefill(engine: Engine, prompt: tuple[int, ...]) -> None:
    async for _ in engine.prefill(PrefillRequest(request_id="p", prompt=prompt, sampling=Sampling())):
        continue
    while engine.busy:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def test_price_of_a_real_engine_arrives_at_the_routers_candidate(engine_of: EngineMaker, model: Model, prompts: Prompts) -> None:
    """Hot prompts that push each other out have a price; room that is left has none."""
    block_bytes = model.geometry.bytes_per_token * BLOCK
    server, cluster = make_server(), ScriptedCluster("m", block_tokens=BLOCK)
    async with engine_of(NullStore(), resident_bytes=KEEP * block_bytes) as engine:
        add_events(server, engine.events)
        address = bind(server, "127.0.0.1:0")
        await server.start()
        dispatcher = build_dispatcher(
            model="m", view=cluster, connect=cluster.connect, probe=NoPool(), limits=Limits(), clock=MonotonicClock(),
            feed=lambda view, index: MemberFeeds(view, index, lambda member: EventsRpc(address, engine.events.identity)),
        )  # fmt: skip
        dispatcher.start()
        cluster.add("prefill", NoPool(), info={EVENTS_INFO: "{}/{}".format(*engine.events.identity)})

        async def candidate(free: int) -> Candidate:
            """The worker, once it has been heard to have so many tokens to spare."""
            job = Job(request_id="r", prompt=prompts(200, seed=99), max_tokens=1, stop_tokens=(), sampling=Sampling(), deadline_ns=2**62)
            async with asyncio.timeout(20):
                while True:
                    await asyncio.sleep(0.02)
                    chosen = dispatcher.chooser.peek("prefill", Need(job), dispatcher.fleet.alive("prefill"))
                    if chosen is not None and (found := chosen.scored.candidate).free_tokens == free:
                        return found

        try:
            assert (await candidate(KEEP * BLOCK)).price_s == 0
            await prefill(engine, prompts(3 * BLOCK, seed=1))
            assert (await candidate((KEEP - 3) * BLOCK)).price_s == 0
            for seed in (1, 2, 3, 4, 1, 2, 3, 4):
                await prefill(engine, prompts(3 * BLOCK, seed=seed))
            found = await candidate(0)
            learnt = dispatcher.chooser.learnt("prefill")
            assert learnt is not None
            assert 0 < found.price_s <= 3 * learnt.estimate.token_s()
        finally:
            await dispatcher.close()
            await server.stop(None)


async def test_blocks_that_the_pool_has_are_told_from_those_it_lacks(engine_of: EngineMaker, model: Model, prompts: Prompts) -> None:
    """Pushed or loaded: the pool has them. A pool that takes nothing has nothing."""
    store = MemoryStore(model.geometry.bytes_per_token)
    resident_bytes = KEEP * model.geometry.bytes_per_token * BLOCK
    for fails, expected in ((False, KEEP), (True, 0)):
        store.fail_stores = fails
        async with engine_of(store, resident_bytes=resident_bytes) as engine:
            await prefill(engine, prompts(KEEP * BLOCK, seed=5 + fails))
            manager = engine._scheduler.manager
            assert (manager.kept, len(manager._pooled)) == (KEEP, expected)
    store.fail_stores = False
    async with engine_of(store, resident_bytes=resident_bytes) as engine:
        await prefill(engine, prompts(KEEP * BLOCK, seed=5))  # seven blocks are loaded, the last is computed and found there
        assert len(engine._scheduler.manager._pooled) == KEEP
        assert engine._parts.loads.tokens_per_s > 0
