"""A rank over CPU tensors and a pool of real node processes."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvpool.connectors.vllm.link import PoolLink
from kvpool.connectors.vllm.messages import LoadJob, SaveJob, StepPlan, StepReport
from kvpool.connectors.vllm.namespace import Part, namespace_of
from kvpool.connectors.vllm.pages import HostPages
from kvpool.connectors.vllm.settings import Settings
from kvpool.connectors.vllm.worker import Worker
from kvpool.testing.node_process import poll
from kvpool.transport.reach import Bytes
from kvpool.units import SECOND

LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 4, 40, 3, 16, 128
ALL = (LAYERS, BLOCKS, HEADS, TOKENS, WIDTH)


def names_of(text: str, count: int) -> list[bytes]:
    """Names of a chain's blocks."""
    return [hashlib.sha256(f"{text} {number}".encode()).digest() for number in range(count)]


class Seen:
    """`HostPages` that note how large the memory is that each payload is part of."""

    def __init__(self, pages: HostPages) -> None:
        self._pages, self.layers, self.roots = pages, pages.layers, list[int]()

    def out(self, block_ids: Sequence[int]) -> Any:
        return self._noting(self._pages.out(block_ids))

    def into(self, block_ids: Sequence[int]) -> Any:
        return self._noting(self._pages.into(block_ids))

    def _noting(self, blocks: Any) -> Any:
        def noting(copy: Any) -> Any:
            def noted(j: int, payload: Bytes) -> None:
                root = payload
                while isinstance(root.base, np.ndarray):
                    root = root.base
                self.roots.append(root.nbytes)
                copy(j, payload)

            return noted

        blocks.read, blocks.write = noting(blocks.read), noting(blocks.write)
        return blocks


class Rank:
    """A worker over `kv`, random bits of bfloat16 `[layers, blocks, heads, tokens, width]`, and steps that a test makes.

    `known`: failures that its scheduler knows of.
    """

    def __init__(self, pool: str, *, seed: int = 0, transport: str = "auto", shape: tuple[int, ...] = ALL, **settings: Any) -> None:
        self.kv = torch.randint(0, 1 << 15, shape, dtype=torch.int16, generator=torch.Generator().manual_seed(seed))
        self.pages = Seen(HostPages({f"layer{n}": self.kv[n] for n in range(shape[0])}, shape[1]))
        namespace = namespace_of(
            {"engine": "test"}, weights=b"w", layer_bytes=self.pages.layers.layer_bytes, block_tokens=shape[3], part=Part()
        )
        self.settings = Settings(pool=pool, transport=transport, **settings)
        self.link = PoolLink(pool, namespace, transport=transport, lookup_s=0.25)
        self.worker = Worker(namespace.root(), self.pages, self.link, self.settings)
        self._root = namespace.root()
        self._told: dict[str, int] = {}
        self._number = 0
        self.known = 0

    def step(
        self,
        chain: str,
        *,
        load: tuple[int, list[int]] | None = None,
        save: tuple[int, list[int]] | None = None,
        within_step: bool = True,
        hand_off: bool = False,
        failures_seen: int | None = None,
    ) -> None:
        """One step: (first block of the chain, the engine's blocks) to load and to save."""
        plan = StepPlan(failures_seen=self.known if failures_seen is None else failures_seen)
        count = max((first + len(ids) for first, ids in filter(None, (load, save))), default=0)
        plan.names[chain] = names_of(chain, count)[self._told.get(chain, 0) :]
        self._told[chain] = max(count, self._told.get(chain, 0))
        if load is not None:
            plan.loads.append(LoadJob(chain, *load, within_step, int(self.settings.load_s * SECOND)))
        if save is not None:
            self._number += 1
            plan.saves.append(SaveJob(self._number, chain, *save))
        plan.hand_offs = [chain] if hand_off else []
        self.worker.bind(plan)
        self.worker.start_loads(forward=within_step)
        for name in self.pages.layers.names:
            self.worker.wait_layer(name)
        self.worker.finish_step()

    def saved(self, chain: str, ids: list[int], first: int = 0) -> int:
        """Save blocks and wait for it; how many the pool holds."""
        self.step(chain, save=(first, ids))
        return self.report().saved[self._number][0]

    def report(self) -> StepReport:
        """What got done, when all is."""
        assert self.worker.drain(30)
        report = self.worker.report() or StepReport()
        self.known = max(self.known, report.failed_within)
        return report

    def found(self, chain: str, count: int) -> int:
        """How many leading blocks the pool has."""
        keys = [hashlib.sha256(self._root + name).digest() for name in names_of(chain, count)]
        return self.link.lookup(keys)  # type: ignore[arg-type]

    def until_usable(self, chain: str) -> None:
        """Until the pool takes blocks and gives them back."""
        number = 0

        def usable() -> bool:
            nonlocal number
            number += 1
            return self.saved(f"{chain} {number}", [1]) == 1 and self.found(f"{chain} {number}", 1) == 1

        poll(usable, "the pool takes blocks")

    def close(self) -> None:
        assert self.worker.drain(30)
        self.link.close()
