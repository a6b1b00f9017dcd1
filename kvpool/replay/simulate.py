"""A trace in the simulated cluster: its blocks become keys, its block size the cluster's."""

import hashlib
from dataclasses import replace

from kvpool.block import BlockKey
from kvpool.replay.sim import Cluster, Outcome, SimRequest, World, make_system, outcome
from kvpool.replay.traces import Trace, TraceRequest

_UNKNOWN_BLOCK = 512
"""Tokens per block for traces that don't say who shares what: nobody does."""


def world_of(trace: Trace, world: World | None = None) -> World:
    """`world` (by default the standard one) with the trace's block size and as many tokens of memory."""
    world = world or World()
    size = trace.block_tokens or _UNKNOWN_BLOCK
    return replace(world, block_tokens=size, node_blocks=world.node_blocks * world.block_tokens // size)


def sim_requests(trace: Trace, speed: float = 1.0) -> list[SimRequest]:
    """The requests of `trace`, arriving `speed` times as fast; blocks that the trace doesn't name are nobody else's."""
    size = trace.block_tokens or _UNKNOWN_BLOCK
    return [_request(index, request, size, speed) for index, request in enumerate(trace.requests)]


def simulate(trace: Trace, policy: str, *, speed: float = 1.0, seed: int = 0, world: World | None = None) -> Outcome:
    """What `policy` makes of `trace`. Raises `ConfigError` for a policy that there isn't."""
    world = world_of(trace, world)
    cluster = Cluster(world, make_system(policy, seed))
    return outcome(world, cluster, cluster.run(sim_requests(trace, speed)))


def _request(index: int, request: TraceRequest, size: int, speed: float) -> SimRequest:
    named = [_key(b"block", block) for block in request.blocks]
    missing = -(-request.prompt_tokens // size) - len(named)
    own = [_key(b"own", index << 20 | at) for at in range(missing)]
    return SimRequest(
        request_id=str(index),
        arrived_s=request.at_ns / 1e9 / speed,
        prompt_tokens=request.prompt_tokens,
        output_tokens=max(1, request.output_tokens),
        keys=(*named, *own),
        session=request.session,
        tenant=request.tenant,
    )


def _key(kind: bytes, number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(kind + number.to_bytes(16, "little")).digest())
