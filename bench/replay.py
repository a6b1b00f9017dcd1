"""Replay a trace against an eviction policy, as one node with room for so many blocks would live it.

For each request, in order of arrival:

1. *Hit*: the leading run of its blocks that are resident. A block behind a gap is no hit, since its prefix has to be computed anyway.
   Block hit = blocks of these runs / blocks asked for. Token hit = tokens of these runs / prompt tokens; the last block of a
   prompt counts what the prompt has of it.
2. *Touch*: every resident block of the request, behind a gap too, tails first, as `PoolState.acquire` does.
3. *Make room*: the policy's victims leave until all other blocks of the request fit. Passed over, as in `PoolState.reserve`: parents
   of what is about to come. If it still doesn't fit, the tail of the request stays outside.
4. *Insert* the others, tails first, as `PoolState.commit` does.

Nothing is leased and the answer's tokens are not stored: the traces have ids for prompts only.

`belady` is the bound: it knows when each block is asked for next and keeps those with the nearest next use; a block that isn't
worth its room doesn't come in at all (L. A. Belady, IBM Systems Journal 5(2), 1966, with bypass). The next use of a head is never
later than that of its tail, so with ties going against the deeper block what it keeps is always whole prefixes, and no policy
can have more block hits. (Token hits could differ from the best by the short last blocks of prompts.)

*Recompute seconds saved*: prefilling n tokens of a model with l layers of width d takes flops(n) = l (a n² d + b n d²), a = 4, b = 22
(Mooncake, https://arxiv.org/abs/2407.00079, section 5), so a run of n tokens saves flops(n) / rate, and a block deep in a chain saves
more than the same block near the head. Model: l = 80, d = 8192 (a 70B Llama). Rate: 8 x 312 TFLOP/s (eight A800 at their peak).
"""

from contextlib import closing
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Final

from kvpool.policy.eviction import Arrival, EvictionPolicy
from kvpool.replay.traces import Trace

LAYERS: Final = 80
WIDTH: Final = 8192
FLOPS_PER_S: Final = 8 * 312e12
BYTES_PER_TOKEN: Final = 2 * LAYERS * 8 * 128 * 2  # keys and values of 8 heads of 128, 2 bytes each


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one replay hit. Shares are 0..1."""

    token_hit: float
    block_hit: float
    recompute_seconds_saved: float


def references(trace: Trace) -> int:
    """Blocks of all requests."""
    return sum(len(request.blocks) for request in trace.requests)


def prefill_seconds(tokens: int) -> float:
    """Time to compute the first `tokens` tokens of a prompt. See the top of this file."""
    return LAYERS * (4.0 * tokens * tokens * WIDTH + 22.0 * tokens * WIDTH * WIDTH) / FLOPS_PER_S


def replay(trace: Trace, policy: EvictionPolicy, capacity: int) -> Outcome:
    """Run `trace` over `policy`, a fresh one, with room for `capacity` blocks."""
    tally = _Tally(trace)
    resident = bytearray(trace.unique)
    free, block_tokens = capacity, trace.block_tokens
    length = block_tokens * BYTES_PER_TOKEN
    inserted, touched, removed = policy.inserted, policy.touched, policy.removed
    for at_ns, tokens, _, numbers, *_ in trace.requests:
        blocks: Any = numbers  # a policy takes any hashable key; numbers keep the replay lean
        run, size = 0, len(blocks)
        while run < size and resident[blocks[run]]:
            run += 1
        tally.add(run, tokens)
        new: list[int] = []  # positions, tails first
        for position in range(size - 1, -1, -1):
            block = blocks[position]
            if resident[block]:
                touched(block, at_ns, tokens)
            else:
                new.append(position)
        if len(new) > free:
            parents = {blocks[position - 1] for position in new if position}
            with closing(policy.victims()) as victims:
                victim: Any
                for victim in victims:
                    if victim not in parents:
                        removed(victim)
                        resident[victim] = 0
                        free += 1
                        if free == len(new):
                            break
            if free < len(new):
                new = new[len(new) - free :]
        for position in new:
            block = blocks[position]
            parent = blocks[position - 1] if position else None
            inserted(Arrival(block, parent, position * block_tokens, length, tokens), at_ns)
            resident[block] = 1
        free -= len(new)
    return tally.outcome()


def infinite(trace: Trace) -> Outcome:
    """What a store that never evicts would hit: the most there is."""
    tally, seen = _Tally(trace), bytearray(trace.unique)
    for _, tokens, _, blocks, *_ in trace.requests:
        run = 0
        while run < len(blocks) and seen[blocks[run]]:
            run += 1
        tally.add(run, tokens)
        for block in blocks[run:]:
            seen[block] = 1
    return tally.outcome()


def belady(trace: Trace, capacity: int) -> Outcome:
    """What the best possible choice with knowledge of the future would hit. See the top of this file."""
    tally = _Tally(trace)
    following = _next_uses(trace)
    due = [0] * trace.unique  # of resident blocks: the request that asks for it next, 0: not resident
    held = 0
    farthest: list[tuple[int, int, int]] = []  # (-next use, -position, block); outdated entries disagree with `due`
    for (_, tokens, _, blocks, *_), next_uses in zip(trace.requests, following, strict=True):
        run = 0
        while run < len(blocks) and due[blocks[run]]:
            run += 1
        tally.add(run, tokens)
        for position, block in enumerate(blocks):
            held -= due[block] > 0
            due[block] = next_use = next_uses[position]
            if next_use:
                held += 1
                heappush(farthest, (-next_use, -position, block))
        while held > capacity:
            negative, _, block = heappop(farthest)
            if due[block] == -negative:
                due[block] = 0
                held -= 1
    return tally.outcome()


def _next_uses(trace: Trace) -> list[list[int]]:
    """Per request and block the index of the next request that asks for it, 0 for none."""
    upcoming = [0] * trace.unique
    following: list[list[int]] = []
    for index in range(len(trace.requests) - 1, -1, -1):
        blocks = trace.requests[index].blocks
        following.append([upcoming[block] for block in blocks])
        for block in blocks:
            upcoming[block] = index
    following.reverse()
    return following


class _Tally:
    """Sums over the requests of one replay."""

    __slots__ = ("_blocks", "_seconds", "_tokens", "_trace")

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._blocks = self._tokens = 0
        self._seconds = 0.0

    def add(self, run: int, tokens: int) -> None:
        """One request of `tokens` found its first `run` blocks."""
        if run:
            found = min(tokens, run * self._trace.block_tokens)
            self._blocks += run
            self._tokens += found
            self._seconds += prefill_seconds(found)

    def outcome(self) -> Outcome:
        """The shares of everything so far."""
        return Outcome(
            token_hit=self._tokens / max(1, self._trace.prompt_tokens),
            block_hit=self._blocks / max(1, references(self._trace)),
            recompute_seconds_saved=self._seconds,
        )
