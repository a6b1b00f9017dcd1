"""What one seed's cluster is like, drawn before anything happens.

Theory. Three kinds of world. *calm*: nodes only come and go in good order, the store may be away or emptied, the config changes; then what
was stored stays readable all the time. *careful*: two copies, and one fault at a time, the next when the world has come to rest;
then nothing is lost. *wild*: any faults at any time, perhaps with too little memory; then what is read is right, and afterwards all comes
to rest.
"""

from dataclasses import dataclass
from hashlib import sha256
from random import Random

from kvpool.block import Geometry, LayerSpec, Namespace
from kvpool.cluster.config import ClusterConfig
from kvpool.node.balancer import BalanceSettings
from kvpool.node.cluster import NodePlace
from kvpool.testing.sim.world import stream
from kvpool.units import MIB, MS, SECOND, US

BLOCK_TOKENS = 16
NAMESPACE = Namespace(
    model="m",
    revision="1",
    weights_digest=bytes(32),
    geometry=Geometry((LayerSpec("full", 1, 2, 2),), BLOCK_TOKENS, "float32"),
    rope="none",
)
CALM = ("join", "drain", "cancel drain", "store down", "store emptied", "config")
CAREFUL = ("kill", "power", "freeze", "alone", "storeless", "cut", "store down")
WILD = tuple(dict.fromkeys((*CALM, *CAREFUL, "flip", "client freeze", "client crash", "client cut")))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterWorld:
    """One seed's cluster. Nodes `n0`, `n1`, ... with `places`; `spare` of them join later. `chains`: the tokens of each chain.

    `fault_ns`: mean time between two faults; `for_ns`: how long one lasts on average. `thread_ns`: how long a thread takes to begin, at
    most; `rate`: bytes a second that a balancer pushes, 0: as the config says.
    """

    seed: int
    kind: str
    ids: tuple[str, ...]
    places: tuple[NodePlace, ...]
    spare: int
    client_hosts: tuple[str, ...]
    lease_ms: int
    balance: BalanceSettings
    config: ClusterConfig
    slice: int
    capacity_blocks: int
    policy: str
    offer: str
    delay_ns: int
    jitter_ns: int
    loss: float
    chains: tuple[tuple[int, ...], ...]
    lanes: int
    think_ns: int
    patience_ns: int
    faults: tuple[str, ...]
    fault_ns: int
    for_ns: int
    thread_ns: int
    rate: int
    audit_every: int

    @property
    def roomy(self) -> bool:
        """Whether nothing is evicted for want of memory."""
        return self.capacity_blocks >= sum(len(chain) // BLOCK_TOKENS for chain in self.chains)

    def describe(self) -> str:
        """In a few words, for a transcript's head."""
        return (
            f"seed {self.seed}: {self.kind}, {len(self.ids)} nodes ({self.spare} later), {len(self.client_hosts)} clients, "
            f"copies {self.config.copies}, extents of {self.config.extent_tokens} tokens, lease {self.lease_ms} ms, loss {self.loss}, "
            f"{self.capacity_blocks} blocks a node for {sum(len(chain) // BLOCK_TOKENS for chain in self.chains)}, "
            f"{self.offer}, faults: {', '.join(self.faults)}"
        )


def draw_cluster(seed: int, nodes: int) -> ClusterWorld:
    """The cluster of a seed, of `nodes` >= 2 nodes."""
    rng = stream(seed, "cluster")
    kind = rng.choice(("calm", "careful", "wild"))
    lease_ms = rng.choice((600, 1200))
    spare = rng.randint(1, max(1, nodes - 3)) if kind != "careful" else 0
    chains = _draw_chains(rng)
    blocks = sum(len(chain) // BLOCK_TOKENS for chain in chains)
    tight = kind == "wild" and rng.random() < 0.3
    offered = {"calm": CALM, "careful": CAREFUL, "wild": WILD}[kind]
    shared = rng.random() < 0.6
    return ClusterWorld(
        seed=seed,
        kind=kind,
        ids=tuple(sha256(f"{seed}/{index}".encode()).hexdigest()[:32] for index in range(nodes)),
        places=tuple(_draw_place(rng, index, shared) for index in range(nodes)),
        spare=spare,
        client_hosts=tuple(f"h{index}" if shared else f"ch{index}" for index in range(rng.randint(1, 3))),
        lease_ms=lease_ms,
        balance=BalanceSettings(repair_s=rng.choice((3.0, 8.0)), news_s=lease_ms / 1000 * rng.choice((1.5, 3.0))),
        config=_draw_config(rng, kind),
        slice=rng.choice((3, 8, 64)),
        capacity_blocks=max(8, blocks // 4) if tight else 2 * blocks,
        policy=rng.choice(("prefix-lru", "lru")),
        offer=rng.choice(("ucx", "grpc")),
        delay_ns=rng.choice((100 * US, MS, 5 * MS)),
        jitter_ns=rng.choice((50 * US, 2 * MS)),
        loss=rng.choice((0.0, 0.01, 0.05)) if kind == "wild" else 0.0,
        chains=chains,
        lanes=rng.choice((1, 1, 2)),
        think_ns=rng.choice((150, 400)) * MS,
        patience_ns=rng.choice((2, 5)) * SECOND if kind != "wild" else rng.choice((200, 1000, 4000)) * MS,
        faults=tuple(sorted(rng.sample(offered, rng.randint(3, len(offered))))),
        fault_ns=rng.choice((600, 1500)) * MS,
        for_ns=int(lease_ms * MS * rng.choice((0.5, 2, 6))),
        thread_ns=rng.choice((300 * US, 3 * MS, 30 * MS)),
        rate=rng.choice((0, 10_000, 40_000)),
        audit_every=rng.choice((1, 8, 32)),
    )


def _draw_config(rng: Random, kind: str) -> ClusterConfig:
    return ClusterConfig(
        version=1,
        copies=2 if kind == "careful" else rng.choice((1, 1, 2, 3)),
        extent_tokens=BLOCK_TOKENS * rng.choice((1, 2, 4, 8)),
        handover_s=rng.choice((2.0, 10.0)) if kind == "wild" else 120.0,
        rebalance_bytes_per_s=rng.choice((MIB, 64 * MIB)),
        hot_reads=rng.choice((0, 3, 256)),
        near_copies=rng.random() < 0.7,
    )


def _draw_place(rng: Random, index: int, shared: bool) -> NodePlace:
    return NodePlace(weight=rng.choice((1.0, 1.0, 2.0)), host=f"h{index}" if shared else f"nh{index}", rack=rng.choice(("", "r0", "r1")))


def _draw_chains(rng: Random) -> tuple[tuple[int, ...], ...]:
    """Token chains; some branch off another one's middle."""
    chains: list[tuple[int, ...]] = []
    for number in range(rng.randint(5, 12)):
        stem = rng.choice(chains)[: BLOCK_TOKENS * rng.randint(1, 4)] if chains and rng.random() < 0.3 else ()
        chains.append((*stem, *([number + 1] * BLOCK_TOKENS * rng.randint(2, 8))))
    return tuple(chains)
