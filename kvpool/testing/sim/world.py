"""What one seed's world is like, drawn before anything happens.

Theory. Faults hide each other: a network that loses half of everything never fills a pool. So each seed draws which faults exist at all,
how often, and how large everything is; capacities are a fraction of what the clients want to keep, so eviction is constant. Every concern
has a random stream of its own, seeded by the seed and the concern's name, so that a new fault doesn't reshuffle the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from random import Random

from kvpool.block import BlockKey
from kvpool.policy.eviction import POLICIES
from kvpool.pool import PoolLimits
from kvpool.pool.flow import FlowSettings
from kvpool.units import KIB, MS, US

UNIT = 64
SEGMENT_BYTES = 64 * KIB
TROUBLES = (
    "write error",
    "short write",
    "read error",
    "sync error",
    "misdirected",
    "full",
    "read-only",
    "slow",
    "bit flip",
    "die inside",
    "die inside",
)
"""What a disk may do wrong, deaths twice as often as anything else.

Two of them lie: after a misdirected write or a flipped bit, what was acknowledged may be gone.
"""


def stream(seed: int, concern: str) -> Random:
    """The random stream of one concern of one seed; the same on every machine."""
    return Random(f"kvpool.sim/{seed}/{concern}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block clients may want: name `b7` in transcripts, its key, its chain's parent, tokens before it, frame bytes, tokens
    of the prompt it was first written for, tenant."""

    name: str
    key: BlockKey
    parent: BlockKey | None
    depth: int
    length: int
    sequence: int
    tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkDraw:
    """Chances per message and delays; `clog_ns` and `split_ns` are how long such a fault lasts, 0: there are none."""

    delay_ns: int
    jitter_ns: int
    loss: float
    twice: float
    straggle: float
    clog_ns: int
    split_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientDraw:
    """How clients behave. Weights are relative chances of what a client does next; `*_chance` are per operation."""

    count: int
    lanes: int
    think_ns: int
    step_ns: int
    lease_ns: int
    timeout_ns: int
    batch: int
    ttl_ns: int
    ttl_chance: float
    abort_chance: float
    repeat_chance: float
    linger_chance: float
    renew_chance: float
    wrong_suspect_chance: float
    careless: float
    streaming: float
    weights: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDraw:
    """Processes on the node's host, see `local.py`; `count` 0: there are none, and no board. Weights and chances as in `ClientDraw`."""

    count: int
    think_ns: int
    step_ns: int
    lease_ns: int
    hold_chance: float
    abort_chance: float
    weights: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultDraw:
    """Mean time between faults of a kind in ns, 0: there are none. `audit_every`: node calls between two full audits."""

    client_crash_ns: int
    client_stop_ns: int
    stop_for_ns: int
    node_crash_ns: int
    node_down_ns: int
    bit_flip_ns: int
    clock_jump_ns: int
    discard_ns: int
    audit_every: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BelowDraw:
    """A world's slower tier. `kind` is `none`, `memory` or `ssd`; times: how often a flush may start, how long a transfer takes.

    `ballast`: pages of other records in it at first, so that it is soon full. `troubles` are the disk's faults this world has (see
    `ground.py`), each for a while, on average every `trouble_ns`.
    """

    kind: str
    flow: FlowSettings
    capacity_bytes: int
    max_objects: int
    ballast: int
    pump_ns: int
    transfer_ns: int
    troubles: tuple[str, ...]
    trouble_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One seed's world."""

    seed: int
    policy: str
    capacity_bytes: int
    limits: PoolLimits
    tick_ns: int
    blocks: tuple[Block, ...]
    chains: tuple[tuple[int, ...], ...]
    tenants: tuple[str, ...]
    quota_bytes: int
    network: NetworkDraw
    clients: ClientDraw
    local: LocalDraw
    faults: FaultDraw
    below: BelowDraw

    def describe(self) -> str:
        """The world in a few words, for a transcript's head."""
        off = [name for name in FaultDraw.__slots__ if name.endswith("_ns") and not getattr(self.faults, name)]
        return (
            f"seed {self.seed}: {self.policy}, {self.capacity_bytes} bytes for {sum(b.length for b in self.blocks)} wanted in "
            f"{len(self.blocks)} blocks, below {self.below.kind}, {self.clients.count} clients, leases {self.clients.lease_ns // US} us, "
            f"loss {self.network.loss}, without: {', '.join(off) or 'nothing'}"
        )


def draw_world(seed: int) -> World:
    """The world of a seed."""
    rng = stream(seed, "world")
    chains, blocks = _draw_blocks(rng)
    wanted = sum(-(-block.length // UNIT) * UNIT for block in blocks)
    capacity = max(int(wanted * rng.choice((0.15, 0.25, 0.4, 0.6, 0.9))), 2 * max(block.length for block in blocks))
    capacity = -(-capacity // UNIT) * UNIT
    tight = rng.random() < 0.25
    limits = PoolLimits(
        max_leases=rng.randint(3, 8) if tight else 64,
        max_leased_blocks=rng.randint(8, 24) if tight else 512,
        max_blocks=rng.randint(6, 16) if tight else 4096,
        max_lease_ns=rng.choice((2, 20, 200)) * MS,
        max_blocks_per_call=64,
        max_pins=rng.randint(2, 8) if tight else 256,
        max_pinned_percent=rng.choice((20, 50)),
        max_story_keys=512,
    )
    tenants = tuple(sorted({block.tenant for block in blocks}))
    clients = _draw_clients(rng, tenants)
    local, fence_ns = _draw_local(stream(seed, "world local"), clients)
    return World(
        seed=seed,
        policy=max(POLICIES, key=lambda name: stream(seed, f"policy {name}").random()),  # a new policy takes some seeds from each
        capacity_bytes=capacity,
        limits=replace(limits, fence_ns=fence_ns),
        tick_ns=rng.choice((200 * US, MS, 5 * MS)),
        blocks=blocks,
        chains=chains,
        tenants=tenants,
        quota_bytes=capacity // rng.randint(2, 5),
        network=_draw_network(rng),
        clients=clients,
        local=local,
        faults=_draw_faults(rng, clients.think_ns),
        below=_draw_below(stream(seed, "world below"), capacity, clients.think_ns),
    )


def _draw_blocks(rng: Random) -> tuple[tuple[tuple[int, ...], ...], tuple[Block, ...]]:
    """A small forest of chains: some start afresh, some branch off another chain's middle."""
    lengths = rng.choice(((64, 100, 128, 192), (64, 200, 256, 640, 1000), (128,), (320,)))
    tenants = rng.choice((("",), ("", "red"), ("red", "blue", "")))
    chains: list[tuple[int, ...]] = []
    blocks: list[Block] = []
    for _ in range(rng.randint(4, 10)):
        stem = rng.choice(chains)[: rng.randint(1, 3)] if chains and rng.random() < 0.4 else ()
        tenant = blocks[stem[0]].tenant if stem else rng.choice(tenants)
        chain = list(stem)
        grows = rng.randint(1, 5)
        sequence = (len(chain) + grows) * 16
        for _ in range(grows):
            number = len(blocks)
            parent = blocks[chain[-1]] if chain else None
            length = rng.choice(lengths)
            key = BlockKey(sha256(b"block %d" % number).digest())
            depth = 0 if parent is None else parent.depth + 16
            parent_key = None if parent is None else parent.key
            blocks.append(
                Block(name=f"b{number}", key=key, parent=parent_key, depth=depth, length=length, sequence=sequence, tenant=tenant)
            )
            chain.append(number)
        chains.append(tuple(chain))
    return tuple(chains), tuple(blocks)


def _draw_network(rng: Random) -> NetworkDraw:
    def maybe(chance: float, *choices: float) -> float:
        return rng.choice(choices) if rng.random() < chance else 0.0

    return NetworkDraw(
        delay_ns=rng.choice((20, 100, 400)) * US,
        jitter_ns=rng.choice((1, 50, 500)) * US,
        loss=maybe(0.5, 0.01, 0.05, 0.2),
        twice=maybe(0.5, 0.02, 0.1),
        straggle=maybe(0.5, 0.02, 0.1),
        clog_ns=int(maybe(0.4, 2 * MS, 10 * MS)),
        split_ns=int(maybe(0.4, 2 * MS, 20 * MS)),
    )


def _draw_clients(rng: Random, tenants: Sequence[str]) -> ClientDraw:
    def maybe(chance: float, *choices: float) -> float:
        return rng.choice(choices) if rng.random() < chance else 0.0

    step_ns = rng.choice((20, 100, 400)) * US
    return ClientDraw(
        count=rng.randint(2, 6),
        lanes=rng.randint(1, 3),
        think_ns=rng.choice((100, 500, 2000)) * US,
        step_ns=step_ns,
        lease_ns=rng.choice((2, 6, 20, 60, 200)) * step_ns + 500 * US,
        timeout_ns=rng.choice((2, 8, 30)) * MS,
        batch=rng.randint(1, 5),
        ttl_ns=rng.choice((500 * US, 3 * MS, 20 * MS)),
        ttl_chance=maybe(0.5, 0.2, 0.7),
        abort_chance=maybe(0.6, 0.05, 0.2),
        repeat_chance=maybe(0.6, 0.1, 0.3),
        linger_chance=maybe(0.5, 0.05, 0.2),
        renew_chance=maybe(0.6, 0.3, 0.8),
        wrong_suspect_chance=maybe(0.3, 0.05),
        careless=rng.choice((0.0, 0.3, 1.0)),
        streaming=rng.choice((0.0, 0.0, 0.3, 1.0)),
        weights=(
            ("put", rng.choice((2, 5, 10))),
            ("get", rng.choice((4, 8, 16))),
            ("probe", rng.choice((0, 1, 3))),
            ("pin", rng.choice((0, 0, 1, 2))),
            ("unpin", rng.choice((0, 0, 1))),
            ("quota", rng.choice((0, 0, 1)) if tenants else 0),
        ),
    )


def _draw_local(rng: Random, clients: ClientDraw) -> tuple[LocalDraw, int]:
    """Processes of the node's host, and how long its fence is: not for ever, so that some writers outlive it."""
    count = rng.choice((0, 0, 1, 3))
    fence_ns = rng.choice((0, 1, 1)) * rng.choice((2, 20)) * clients.step_ns
    draw = LocalDraw(
        count=count,
        think_ns=clients.think_ns // rng.choice((1, 2, 4)),
        step_ns=clients.step_ns,
        lease_ns=clients.lease_ns,
        hold_chance=rng.choice((0.0, 0.2, 0.7)),
        abort_chance=rng.choice((0.0, 0.1)),
        weights=(("glance", rng.choice((2, 8))), ("slab", rng.choice((0, 2, 4)))),
    )
    return draw, fence_ns


def _draw_faults(rng: Random, think_ns: int) -> FaultDraw:
    """Means are multiples of how long clients think, so that fast and slow worlds see about as many faults."""

    def maybe(chance: float, *thinks: int) -> int:
        return rng.choice(thinks) * think_ns if rng.random() < chance else 0

    return FaultDraw(
        client_crash_ns=maybe(0.5, 20, 80),
        client_stop_ns=maybe(0.6, 10, 40),
        stop_for_ns=rng.choice((2, 10, 30)) * think_ns,
        node_crash_ns=maybe(0.4, 40, 120),
        node_down_ns=rng.choice((1, 5)) * think_ns,
        bit_flip_ns=maybe(0.4, 3, 15),
        clock_jump_ns=maybe(0.4, 10, 40),
        discard_ns=maybe(0.3, 8, 30),
        audit_every=rng.choice((1, 8, 16, 32)),
    )


def _draw_below(rng: Random, capacity_bytes: int, think_ns: int) -> BelowDraw:
    kind = rng.choice(("none", "none", "memory", "ssd", "ssd"))
    return BelowDraw(
        kind=kind,
        flow=FlowSettings(
            write=rng.choice(("through", "back")),
            admission=rng.choice(("all", "all", "hot")),
            hot_uses=rng.randint(1, 3),
            clean_percent=rng.choice((10, 30, 60)),
            batch_bytes=rng.choice((1, 400, 2000)),
        ),
        capacity_bytes=rng.choice((2, 2, 3)) * SEGMENT_BYTES if kind == "ssd" else capacity_bytes * rng.randint(1, 4) // 2,
        max_objects=rng.choice((8, 24, 64)),
        ballast=rng.choice((0, 10, 20, 40)) if kind == "ssd" else 0,
        pump_ns=think_ns // rng.choice((2, 8)),
        transfer_ns=think_ns // rng.choice((1, 4)),
        troubles=tuple(rng.sample(TROUBLES, rng.choice((0, 1, 1, 2, 3)))),
        trouble_ns=think_ns * rng.choice((5, 20)),
    )
