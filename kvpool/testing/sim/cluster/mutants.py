"""Defects of a cluster on purpose: each mutant breaks one rule of the real code, and the simulation must notice."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from kvpool.block import BlockKey
from kvpool.client import frames, reading, writing
from kvpool.cluster import view as views
from kvpool.cluster.config import ClusterConfig
from kvpool.cluster.member import Identity, Leased
from kvpool.cluster.view import View
from kvpool.node import balancer as balancing
from kvpool.node.balancer import Balancer
from kvpool.node.inventory import Held, Inventory
from kvpool.policy import moves, placement
from kvpool.policy.moves import Verdict as Move
from kvpool.policy.placement import NodeState, Placement
from kvpool.testing.sim.cluster.run import run_cluster
from kvpool.testing.sim.cluster.world import ClusterWorld, draw_cluster
from kvpool.testing.sim.mutant import Mutant, Patch
from kvpool.testing.sim.run import Verdict
from kvpool.wire import fence

NODES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMutant(Mutant):
    """A `Mutant` that is hunted in clusters, in those of `kind` only if that is given: other seeds are passed over and not counted."""

    kind: str = ""

    def hunt(self, events: int, seeds: int | None = None) -> Verdict | None:
        """The first seed that notices, None when none of them does."""
        with self.applied():
            for world in islice(self._worlds(), seeds or self.seeds):
                verdict = run_cluster(world.seed, events, NODES)
                if verdict.violation:
                    return verdict
        return None

    def _worlds(self) -> Iterator[ClusterWorld]:
        return (world for world in (draw_cluster(seed, NODES) for seed in count()) if self.kind in ("", world.kind))


def _former_owner_forgotten() -> Sequence[Patch]:
    place = placement._Table.place

    def forget(self: placement._Table, ranking: Sequence[int], copies: int) -> Placement:
        targets = place(self, ranking, copies).targets
        return Placement(targets, targets)

    return [(placement._Table, "place", forget)]


def _no_fence() -> Sequence[Patch]:
    return [(fence, "check", lambda *_, **__: None)]


def _judged(change: Callable[..., Move]) -> Sequence[Patch]:
    judge = moves.judge

    def judged(me: str, targets: Sequence[str], states: Any, holds: Any, *, sure: bool) -> Move:
        return change(judge, me, targets, states, holds, sure)

    return [(balancing, "judge", judged)]


def _dropped_unconfirmed() -> Sequence[Patch]:
    def change(judge: Any, me: str, targets: Sequence[str], states: Any, holds: Any, sure: bool) -> Move:
        move = judge(me, targets, states, holds, sure=sure)
        return Move(move.push, bool(targets) and me not in targets, move.safe)

    return _judged(change)


def _news_not_waited_for() -> Sequence[Patch]:
    return _judged(lambda judge, me, targets, states, holds, sure: judge(me, targets, states, holds, sure=True))


def _joining_counts_as_firm() -> Sequence[Patch]:
    def change(judge: Any, me: str, targets: Sequence[str], states: Any, holds: Any, sure: bool) -> Move:
        firm = {node: NodeState.ACTIVE if state is NodeState.JOINING else state for node, state in states.items()}
        return Move(*judge(me, targets, firm, holds, sure=sure))

    return _judged(change)


def _targets_repair_nothing() -> Sequence[Patch]:
    def change(judge: Any, me: str, targets: Sequence[str], states: Any, holds: Any, sure: bool) -> Move:
        move = judge(me, targets, states, holds, sure=sure)
        return Move(() if me in targets else move.push, move.drop, move.safe)

    return _judged(change)


def _pushed_unchecked() -> Sequence[Patch]:
    return [(frames, "_sound", lambda data, key: True)]


def _last_slice_forgotten() -> Sequence[Patch]:
    slices = Inventory.slices

    async def forget(self: Inventory, extent_tokens: int) -> Any:
        waiting: list[Held] | None = None
        async for held in slices(self, extent_tokens):
            if waiting is not None:
                yield waiting
            waiting = held

    return [(Inventory, "slices", forget)]


def _minority_votes() -> Sequence[Patch]:
    def vote(entries: Iterable[Leased]) -> frozenset[Identity]:
        return frozenset(subject for entry in entries for subject in entry.reports)

    return [(views, "vote", vote)]


def _stale_view() -> Sequence[Patch]:
    observe = View.observe

    def once(self: View, *arguments: Any, **options: Any) -> bool:
        return not self.members and observe(self, *arguments, **options)

    return [(View, "observe", once)]


def _emptied_store_believed() -> Sequence[Patch]:
    observe = View.observe

    def believe(self: View, *arguments: Any, birth: str | None, **options: Any) -> bool:
        self._lost, self._birth, self._doubt_since_ns = False, birth, None
        return observe(self, *arguments, birth=birth, **options)

    return [(View, "observe", believe)]


def _config_goes_back() -> Sequence[Patch]:
    observe = View.observe

    def newest(self: View, *arguments: Any, config: ClusterConfig | None = None, **options: Any) -> bool:
        self.config = config or ClusterConfig()
        return observe(self, *arguments, config=config, **options)

    return [(View, "observe", newest)]


def _near_copy_is_own() -> Sequence[Patch]:
    held = Inventory._held

    def own(self: Inventory, key: BlockKey, extent_tokens: int) -> Held | None:
        one = held(self, key, extent_tokens)
        return None if one is None else one._replace(near=False)

    return [(Inventory, "_held", own)]


def _settled_too_early() -> Sequence[Patch]:
    return [(Balancer, "_clean", staticmethod(lambda done: True))]


def _commit_not_asked_for() -> Sequence[Patch]:
    async def commit(core: Any, transfer: Any, near: Any, first: int, has: Sequence[set[str]]) -> None:
        for number, indices in transfer.written.items():
            for index in indices:
                has[index - first].add(transfer.leases[number].link.node.node_id)

    return [(writing, "_commit", commit)]


def _one_round() -> Sequence[Patch]:
    return [(reading, "MAX_ROUNDS", 1)]


CLUSTER_MUTANTS: tuple[ClusterMutant, ...] = tuple(
    ClusterMutant(name=name, what=what, kind=kind, seeds=seeds, patches=patches)
    for name, what, kind, seeds, patches in (
        ("former owner forgotten", "readers ask only who owns a block now", "calm", 60, _former_owner_forgotten),
        ("no fence", "a node serves calls meant for its last life", "", 40, _no_fence),
        ("dropped unconfirmed", "a block is let go before its targets have it", "", 40, _dropped_unconfirmed),
        ("news not waited for", "a block is let go while others may not know of the change", "calm", 60, _news_not_waited_for),
        ("joining counts as firm", "a block is let go for a node that is still joining", "", 40, _joining_counts_as_firm),
        ("targets repair nothing", "targets push to none that lack a copy", "", 40, _targets_repair_nothing),
        ("pushed unchecked", "a push sends frames that are damaged", "wild", 60, _pushed_unchecked),
        ("last slice forgotten", "a round leaves out its last slice", "", 40, _last_slice_forgotten),
        ("minority votes", "one report is enough for quarantine", "wild", 60, _minority_votes),
        ("stale view", "a view is never renewed", "", 40, _stale_view),
        ("emptied store believed", "who is not in a store that forgot is gone", "", 40, _emptied_store_believed),
        ("config goes back", "a store that forgot resets the config", "", 40, _config_goes_back),
        ("near copy is own", "the balancer takes near copies for the node's own", "", 40, _near_copy_is_own),
        ("settled too early", "a round that failed to push counts as done", "wild", 60, _settled_too_early),
        ("commit not asked for", "a store counts what it has written", "wild", 60, _commit_not_asked_for),
        ("one round", "a reader asks one node only", "calm", 60, _one_round),
    )
)
