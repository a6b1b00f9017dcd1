"""The scheduler's side: what of a request the pool has, what of it is loaded and saved, and which of the engine's blocks that holds back.

Events in, plans out: vLLM's calls come from one thread, and nothing here waits but `lookup`, which has its own limit.

A request. `match` looks its prefix up, once for all ranks: what all of them have. `allocated` plans the load. Each step plans saves of what
gets full, from the first block on that the pool wasn't seen to have, whether the engine computed it or had it already.

Held blocks. A save reads the engine's blocks beside its steps, so each is counted as used once more until all ranks have reported. So it
does not matter what becomes of the request meanwhile: finished, aborted or preempted, its blocks aren't given to another.

A load that comes short makes its request load nothing more, so it can't go round in circles, and what didn't come is saved anew when it has
been computed.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from kvpool.connectors.vllm.chains import Names, keys_of, seed_of
from kvpool.connectors.vllm.messages import LoadJob, SaveJob, StepPlan, StepReport
from kvpool.connectors.vllm.pace import Pace
from kvpool.connectors.vllm.requests import Saving, Story, Tracked
from kvpool.connectors.vllm.settings import Settings
from kvpool.connectors.vllm.stats import Tally
from kvpool.units import SECOND

log = logging.getLogger(__name__)


class Shape(NamedTuple):
    """Of the engine: tokens a block, ranks, whether it `loads` and `saves`, whether block hashes name blocks, whether events are wanted."""

    block_tokens: int
    ranks: int = 1
    loads: bool = True
    saves: bool = True
    always_hand_off: bool = False
    by_hash: bool = True
    events: bool = False


class Lookup(Protocol):
    """The pool, as far as it is asked: see `PoolLink`."""

    @property
    def here(self) -> bool:
        """Whether a node of this host is connected."""
        ...

    def lookup(self, keys: Sequence[Any]) -> int:
        """How many leading blocks the pool holds."""
        ...


class BlockPool(Protocol):
    """vLLM's: counts who uses a block."""

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None:
        """One user more for each."""
        ...

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """One user less for each."""
        ...


class Scheduler:
    """See above. `adapter_digest`: the digest of the weights of a request's LoRA, None if they can't be read."""

    def __init__(self, shape: Shape, settings: Settings, adapter_digest: Callable[[Any], bytes | None]) -> None:
        self._shape, self._settings, self._adapter_digest = shape, settings, adapter_digest
        self._link: Lookup | None = None
        self._roots: list[bytes] = []
        self._block_bytes = 0
        self._pool: BlockPool | None = None
        self._hold_limit = 0
        self._requests: dict[str, Tracked] = {}
        self._loads: list[LoadJob] = []
        self._ended: list[str] = []
        self._savings: dict[int, Saving] = {}
        self._number = 0
        self._held = 0
        self._failures_seen = 0
        self._era = b""
        self._pace = Pace()
        self.stories: list[Story] = []
        self.tally = Tally()

    def connect(self, link: Lookup, roots: list[bytes], block_bytes: int) -> None:
        """The ranks are there: they store blocks under `roots`, the largest of them `block_bytes` each."""
        self._link, self._roots, self._block_bytes = link, roots, block_bytes

    def bind(self, pool: BlockPool) -> None:
        """The engine's blocks are there."""
        self._pool = pool
        self._hold_limit = int(len(pool.blocks) * self._settings.hold_share)

    def match(self, request: Any, local_tokens: int) -> tuple[int, bool]:
        """How many tokens behind the first `local_tokens` can be loaded, and whether beside the steps. Holds nothing."""
        one = self._track(request)
        one.local = local_tokens // self._shape.block_tokens
        one.found = 0
        if one.names is None or self._link is None:
            return 0, False
        names = one.names.upto(request.num_tokens // self._shape.block_tokens)
        one.found = self._look(names)
        if not one.spent:
            one.saved = max(one.saved, one.found)
        limit = min(one.found, (request.num_tokens - 1) // self._shape.block_tokens)  # one token at least is computed
        count = limit - one.local
        if not self._shape.loads or one.spent or count < self._settings.min_blocks:
            return 0, False
        one.within_step = self._within_step(count)
        return count * self._shape.block_tokens, not one.within_step

    def allocated(self, request: Any, block_ids: Sequence[int], external_tokens: int) -> None:
        """The request has its blocks; `external_tokens` of it are to be loaded into them."""
        one = self._requests.get(request.request_id)
        if one is None or not external_tokens:
            return
        count = external_tokens // self._shape.block_tokens
        ids = list(block_ids[one.local : one.local + count])
        limit_ns = self._pace.limit_ns(external_tokens, int(self._settings.load_s * SECOND))
        self._loads.append(LoadJob(request.request_id, one.local, ids, one.within_step, limit_ns))

    def plan(self, scheduled: Sequence[tuple[str, int]], blocks_of: Callable[[str], Sequence[int]], tokens: int, now_ns: int) -> StepPlan:
        """The next step's work, of so many `tokens`. `scheduled`: each request in it, and how many of its tokens have KV then."""
        plan = StepPlan(loads=self._loads, ended=self._ended, failures_seen=self._failures_seen, timed=self._pace.begin(tokens, now_ns))
        self._loads, self._ended = [], []
        for job in plan.loads:
            self._tell(plan, self._requests[job.request_id], job.first + len(job.block_ids))
        if self._shape.saves:
            for request_id, ready in scheduled:
                one = self._requests.get(request_id)
                if one is None or one.names is None:
                    continue
                self._plan_save(plan, one, ready // self._shape.block_tokens, blocks_of)
                if one.hand_off and ready >= one.request.num_prompt_tokens:
                    plan.hand_offs.append(request_id)
                    one.hand_off = False
        return plan

    def reported(self, report: StepReport, now_ns: int) -> None:
        """What the ranks got done."""
        self._pace.end(report.computed, now_ns)
        self._failures_seen = max(self._failures_seen, report.failed_within)
        for request_id, came in report.short.items():
            one = self._requests.get(request_id)
            if one is not None:
                one.spent = True
                one.saved = min(one.saved, one.local + came)
        for number, held in report.saved.items():
            saving = self._savings.get(number)
            if saving is None:
                continue
            saving.reports += held
            if len(saving.reports) >= self._shape.ranks:
                self._let_go(self._savings.pop(number))

    def ended(self, request: Any) -> None:
        """The request is over, however it ended."""
        one = self._requests.pop(request.request_id, None)
        if one is not None and one.told:
            self._ended.append(request.request_id)

    def reset(self, era: bytes) -> None:
        """What was saved may belong to other weights: from now on blocks are named by `era`, too, and requests under way save nothing."""
        self._era = era
        for one in self._requests.values():
            one.names = None

    @property
    def saving(self) -> bool:
        """Whether saves hold blocks of the engine."""
        return bool(self._savings)

    def counts(self) -> dict[str, float]:
        """What was counted since the last call."""
        return self.tally.take()

    def _track(self, request: Any) -> Tracked:
        one = self._requests.get(request.request_id)
        if one is None:
            adapter = self._adapter_digest(request)
            seed = None if adapter is None else seed_of(request, adapter, by_hash=self._shape.by_hash)
            names = None if seed is None else Names(request, self._shape.block_tokens, self._era + seed, by_hash=self._shape.by_hash)
            if names is None:
                self.tally.add("unnamed_requests")
            asked = (getattr(request, "kv_transfer_params", None) or {}).get("do_remote_decode") is True
            one = Tracked(request, names, hand_off=asked or self._shape.always_hand_off)
            self._requests[request.request_id] = one
        return one

    def _look(self, names: list[bytes]) -> int:
        """How many leading blocks all ranks have."""
        assert self._link is not None
        started, found = time.monotonic_ns(), len(names)
        for root in self._roots:
            if found:
                found = min(found, self._link.lookup(keys_of(root, names[:found])))
        self.tally.add("lookups")
        self.tally.add("lookup_seconds", (time.monotonic_ns() - started) / SECOND)
        self.tally.add("lookup_blocks", len(names))
        self.tally.add("found_blocks", found)
        return found

    def _within_step(self, count: int) -> bool:
        """Whether a load of so many blocks is for the step to wait for."""
        if self._settings.load != "auto":
            return self._settings.load != "async"
        small = count * self._block_bytes <= self._settings.sync_bytes
        return self._shape.ranks == 1 and small and self._link is not None and self._link.here

    def _plan_save(self, plan: StepPlan, one: Tracked, full: int, blocks_of: Callable[[str], Sequence[int]]) -> None:
        """Save what the request has full by then and the pool lacks."""
        assert one.names is not None
        shape, request_id = self._shape, one.request.request_id
        if not self._settings.save_decode:
            full = min(full, one.request.num_prompt_tokens // shape.block_tokens)
        full = min(full, len(one.names.upto(full)))
        first = one.saved
        if full <= first or self._pool is None:
            return
        ids = list(blocks_of(request_id)[first:full])
        one.saved = full
        blocks = [self._pool.blocks[number] for number in ids]
        if self._held + len(ids) > self._hold_limit or any(block.is_null for block in blocks):
            self.tally.add("dropped_blocks", len(ids))
            return
        self._tell(plan, one, full)
        self._pool.touch(blocks)
        self._held += len(ids)
        self._number += 1
        self._savings[self._number] = Saving(blocks, story=self._story(one, first, full) if shape.events else None)
        plan.saves.append(SaveJob(self._number, request_id, first, ids))

    def _tell(self, plan: StepPlan, one: Tracked, count: int) -> None:
        """Let the plan say the names of the first `count` blocks, as far as the ranks don't know them."""
        assert one.names is not None
        if count > one.told:
            plan.names.setdefault(one.request.request_id, []).extend(one.names.upto(count)[one.told :])
            one.told = count

    def _let_go(self, saving: Saving) -> None:
        assert self._pool is not None
        self._pool.free_blocks(reversed(saving.blocks))
        self._held -= len(saving.blocks)
        self.tally.add("held_blocks", self._held)
        if saving.story is not None and min(saving.reports) == len(saving.blocks):
            self.stories.append(saving.story)

    def _story(self, one: Tracked, first: int, end: int) -> Story:
        hashes = [bytes(name) for name in one.request.block_hashes[max(first - 1, 0) : end]]
        size = self._shape.block_tokens
        tokens = list(one.request.all_token_ids[first * size : end * size])
        parent = hashes.pop(0) if first else None
        return Story(parent, hashes, tokens, getattr(one.request, "lora_request", None))
