"""A simulated client: the real `AsyncPoolClient` in a process that puts, gets and probes chains, as a member that may report nodes."""

import asyncio
from collections.abc import Sequence
from random import Random

import numpy as np
import numpy.typing as npt

from kvpool.block import BlockKey
from kvpool.client import AsyncPoolClient
from kvpool.errors import UnavailableError
from kvpool.testing.sim.cluster.judge import Judge
from kvpool.testing.sim.cluster.store import SimMembership
from kvpool.testing.sim.cluster.vloop import Process, VirtualLoop
from kvpool.testing.sim.cluster.world import BLOCK_TOKENS, NAMESPACE, ClusterWorld
from kvpool.testing.sim.marks import Coverage

Payload = npt.NDArray[np.uint8]


class Worker:
    """One life of one client. `say` writes a line of a transcript."""

    def __init__(
        self,
        loop: VirtualLoop,
        world: ClusterWorld,
        process: Process,
        membership: SimMembership,
        judge: Judge,
        coverage: Coverage,
        rng: Random,
        chains: Sequence[Sequence[BlockKey]],
    ) -> None:
        self.process = process
        self.membership = membership
        self.client: AsyncPoolClient | None = None
        """Once it has begun."""
        self.resting = False
        """Begin nothing new."""
        self.busy = 0
        self._loop = loop
        self._world = world
        self._judge = judge
        self._coverage = coverage
        self._rng = rng
        self._chains = chains

    async def start(self) -> None:
        """Become a member and work, some lanes side by side."""
        client = await AsyncPoolClient.open(self.membership, NAMESPACE)
        while True:
            try:
                id = f"{0xC:x}{int(self.process.name[1:]):031x}"
                await asyncio.to_thread(self.membership.join, role="decode", address=f"{self.process.name}:1", id=id)
                break
            except UnavailableError:
                await asyncio.sleep(0.3)
        self.client = client
        for _ in range(self._world.lanes):
            self.process.spawn(self._work(client))

    async def _work(self, client: AsyncPoolClient) -> None:
        while True:
            await asyncio.sleep(self._rng.expovariate(1) * self._world.think_ns / 1e9)
            if self.resting:
                continue
            chain = self._rng.choice(self._chains)
            length = self._rng.randint(1, len(chain))
            act = self._rng.choice((self.put, self.get, self.get, self.probe))
            self.busy += 1
            try:
                await act(client, chain[:length])
            except Exception as error:
                self._judge.fail(f"{self.process.name} in {act.__name__}: {type(error).__name__}: {error}")
            self.busy -= 1
            self._loop.events += 1

    async def put(self, client: AsyncPoolClient, chain: Sequence[BlockKey]) -> None:
        """Store a chain, or what is missing behind what is there."""
        first = await client.lookup(chain, timeout_s=self._patience_s) if self._rng.random() < 0.5 else 0
        counts = [BLOCK_TOKENS] * (len(chain) - first)
        if not counts:
            return

        def fill(index: int, payload: Payload) -> None:
            self._judge.fill(chain[index], payload)

        also = [self._rng.choice(self._world.ids)] if self._rng.random() < 0.1 else []
        missing = client.under_replicated
        held = await client.store(chain, first, counts, fill, deadline_ns=self._deadline_ns(), also=also)
        if client.under_replicated > missing:
            self._coverage.hit("store claimed blocks on some targets only")
        self._judge.stored(chain[first:], held)

    async def get(self, client: AsyncPoolClient, chain: Sequence[BlockKey]) -> int:
        """Load a chain's leading run."""
        steady = next((i for i, key in enumerate(chain) if key not in self._judge.steady), len(chain))
        got = 0

        def sink(index: int, payload: Payload) -> None:
            nonlocal got
            if index != got:
                self._judge.fail(f"{self.process.name} got block {index} before block {got}")
            got += 1
            self._judge.read(chain[index], payload)

        done = await client.load(chain, 0, [BLOCK_TOKENS] * len(chain), sink, deadline_ns=self._deadline_ns())
        if done != got:
            self._judge.fail(f"{self.process.name} was told of {done} blocks and got {got}")
        if steady:
            self._coverage.hit("steady block read")
        if done < steady and self._world.kind == "calm":
            self._judge.fail(
                f"{self.process.name} got {done} blocks of {self._judge.name(chain[0])}..., {steady} have been on all their targets"
            )
        if done < sum(1 for key in chain if self._judge.holders(key)):
            self._coverage.hit("read found less than was stored")
        return done

    async def probe(self, client: AsyncPoolClient, chain: Sequence[BlockKey]) -> None:
        """Only ask."""
        await client.lookup(chain, timeout_s=self._patience_s)

    @property
    def _patience_s(self) -> float:
        return self._world.patience_ns / 1e9

    def _deadline_ns(self) -> int:
        return self._loop.now_ns + self._world.patience_ns
