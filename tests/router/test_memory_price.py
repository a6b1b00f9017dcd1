"""A worker whose memory is full of what is asked for again is passed over for a long prompt that nobody shares; in virtual time."""

import pytest

from kvpool.policy.routing import Candidate, WorkerRef
from kvpool.request import Sampling
from kvpool.request.events import NO_PRESSURE, Pressure
from router.assemble import build_dispatcher
from router.dispatch import Dispatcher
from router.job import Job
from router.metrics import Metrics
from router.need import Need
from router.settings import Limits
from router.testing.cluster import ScriptedCluster
from router.testing.loop import VirtualLoop, run_virtual
from router.testing.pooled import KeyPool, PooledWorker

A, B, N, M = (digit * 32 for digit in "abcd")
TOKEN_BYTES = 1000
PROMPT = 6000
FULL, EMPTY, WORTHLESS = Pressure(0, 0.4), Pressure(10_000, 0.4), Pressure(0, 0.0)


class Told:
    """Feeds by which all say how scarce their memory is."""

    def __init__(self, pressures: dict[str, Pressure]) -> None:
        self.pressures = pressures

    def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to close."""

    def complete(self) -> bool:
        return True

    def tells(self, holder: WorkerRef) -> bool:
        return True

    def pressure(self, holder: WorkerRef) -> Pressure:
        return self.pressures.get(holder.id, NO_PRESSURE)

    def counts(self) -> dict[str, int]:
        return {}


def router_of(cluster: ScriptedCluster, pool: KeyPool, loop: VirtualLoop, said: Told) -> Dispatcher:
    router = build_dispatcher(
        model="m", view=cluster, connect=cluster.connect, probe=pool, limits=Limits(), clock=loop, feed=lambda view, index: said
    )
    router.start()
    return router


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("other", [EMPTY, WORTHLESS])
def test_worker_full_of_hot_prefixes_is_passed_over_for_a_long_cold_prompt(role: str, other: Pressure) -> None:
    """All else equal, in either order, and what it would have cost is in the explanation."""

    async def work(loop: VirtualLoop) -> None:
        for first in (FULL, other):
            cluster, pool = ScriptedCluster("m", block_tokens=16, max_tokens=8192), KeyPool(block_tokens=16)
            said = Told({A: first, B: other if first is FULL else FULL})
            for id in said.pressures:
                cluster.add(role, PooledWorker(pool), id=id)
            router = router_of(cluster, pool, loop, said)
            job = Job(request_id="r", prompt=tuple(range(PROMPT)), max_tokens=1, stop_tokens=(), sampling=Sampling(), deadline_ns=2**62)
            chosen = router.chooser.best(role, Need(job), router.fleet.alive(role), "r")
            assert chosen is not None
            assert chosen.worker.ref.id == (B if first is FULL else A)
            assert dict(chosen.scored.terms)["memory"] == 0
            await router.close()

    run_virtual(work)


def test_pools_price_is_paid_for_what_is_computed_only() -> None:
    """Two nodes, their mean price, all their room; a worker that has half of the prompt pays for the other half. And it is exported."""

    async def work(loop: VirtualLoop) -> None:
        cluster, pool = ScriptedCluster("m", block_tokens=16, max_tokens=8192), KeyPool(block_tokens=16)
        cluster.add("prefill", PooledWorker(pool), id=A, info={"token_bytes": str(TOKEN_BYTES)})
        cluster.add("prefill", PooledWorker(pool), id=B)
        for id in (N, M):
            cluster.add("node", None, id=id)
        said = Told({N: Pressure(500 * TOKEN_BYTES, 0.2), M: Pressure(0, 0.6), B: Pressure(0, 0.1)})
        router = router_of(cluster, pool, loop, said)
        prompt = tuple(range(PROMPT))
        job = Job(request_id="r", prompt=prompt, max_tokens=1, stop_tokens=(), sampling=Sampling(), deadline_ns=2**62)
        one, two = router.fleet.alive("prefill")
        router.holdings.index.stored(one.ref, pool.keys(prompt[: PROMPT // 2]), 2)
        learnt = router.chooser.learnt("prefill")
        assert learnt is not None
        token_s = learnt.estimate.token_s()
        scored = router.chooser.peek("prefill", Need(job), [one])
        assert scored is not None
        found: Candidate = scored.scored.candidate
        assert found.pool_free_tokens == 500
        assert found.pool_price_s == pytest.approx(0.4 * token_s)
        missing = PROMPT - found.resident_tokens
        assert dict(scored.scored.terms)["memory"] == pytest.approx(0.4 * token_s * (missing - 500))
        unsaid = router.chooser.peek("prefill", Need(job), [two])
        assert unsaid is not None
        assert dict(unsaid.scored.terms)["memory"] == pytest.approx(0.5 * token_s * PROMPT)  # its own price too; no size, no room
        text = Metrics(router).render().decode()
        assert f'kvpool_router_memory_price{{id="{M}",role="node"}} 0.6' in text
        assert f'kvpool_router_memory_price{{id="{B}",role="prefill"}} 0.1' in text
        await router.close()

    run_virtual(work)
