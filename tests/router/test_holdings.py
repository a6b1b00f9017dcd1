"""What requests show counts for workers that don't say themselves what they hold."""

import pytest

from kvpool.block import chain_keys
from kvpool.clock import MonotonicClock
from kvpool.policy.prefix import PrefixIndex
from kvpool.policy.routing import WorkerRef
from kvpool.request import Sampling
from kvpool.request.events import NO_PRESSURE, Pressure
from router.holdings import Holdings
from router.job import Job
from router.need import Need
from router.probe import GuardedProbe, NoPool
from router.testing.cluster import ScriptedCluster
from router.testing.workers import ScriptedWorker
from router.worker import Said, Worker


class Word:
    """Feeds by which some workers tell of their blocks."""

    def __init__(self, telling: set[WorkerRef]) -> None:
        self.telling = telling

    def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to close."""

    def complete(self) -> bool:
        return True

    def tells(self, holder: WorkerRef) -> bool:
        return holder in self.telling

    def pressure(self, holder: WorkerRef) -> Pressure:
        return NO_PRESSURE

    def counts(self) -> dict[str, int]:
        return {"heard": 1}


@pytest.mark.parametrize(("tells", "blocks"), [(False, 5), (True, 0)])
def test_worker_that_tells_is_not_guessed_about(tells: bool, blocks: int) -> None:
    """A guess that comes after its word would stay: the worker never says twice that a block went."""
    cluster, index = ScriptedCluster("m"), PrefixIndex[WorkerRef]()
    member = cluster.add("decode", ScriptedWorker(lambda prompt, position: 0))
    ref = WorkerRef(member.role, member.id, member.incarnation)
    worker = Worker(ref=ref, port=cluster.connect(member.address), said=Said.of(member.info))
    holdings = Holdings(index, cluster, GuardedProbe(NoPool(), MonotonicClock(), 1.0), Word({ref} if tells else set()))
    prompt = tuple(range(20))
    job = Job(request_id="r", prompt=prompt, max_tokens=1, stop_tokens=(), sampling=Sampling(), deadline_ns=2**62)
    holdings.learn(worker, Need(job))
    assert index.match(chain_keys(worker.root, prompt, 4)).of(ref) == blocks
    assert (holdings.complete, holdings.counts()) == (True, {"heard": 1})
