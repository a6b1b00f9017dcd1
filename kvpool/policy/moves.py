"""What a node does with a block that it holds: whom it pushes it to, and when it lets it go. One rule for join, drain, crash and repair.

Each node applies the rule alone, to what it holds itself and what it asks the block's *targets* (`placement.write_targets`) whether they
have. Nobody keeps a list of moves, so nothing is lost with the node that would have kept it, and an interrupted move is resumed by asking.

* Who pushes. A holder that is no target (any more), or that drains, pushes to every target that lacks the block. Of the targets that
  hold it the first active one pushes to the others. Two that push at once are harmless: the second is told that the block exists.
* Who lets go. A holder that is no target, once all targets have the block and all of them are active: a target that is still joining may
  vanish as quickly as it came. A draining node keeps what it has, it goes as a whole.
* When. A holder lets go only when its view of the cluster is older than news take to reach everybody (`sure`). Otherwise two nodes with
  different views could each count on the other. So at any moment some node holds the block for a reason that all others share.

A block belongs to the extent that its *head* names. Heads are found by walking up the chain in what the node holds. A block whose head
can't be found so (the chain is broken here) stays where it is: nobody can say where it belongs, and readers come to it through its head.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvpool.block import BlockKey
from kvpool.policy.placement import NodeState, blocks_per_extent

Link = Callable[[BlockKey], tuple[BlockKey | None, int] | None]
"""Parent (None for a chain's first block) and depth of a block that is held here; None for others."""


class Verdict(NamedTuple):
    """What becomes of one block: `push` it to these nodes, `drop` it here. `safe`: all of its targets have it."""

    push: tuple[str, ...]
    drop: bool
    safe: bool


def judge(me: str, targets: Sequence[str], states: Mapping[str, NodeState], holds: Callable[[str], bool | None], *, sure: bool) -> Verdict:
    """The verdict on a block that `me` holds.

    `targets`: who should hold it, in order. `states`: of all nodes in the view. `holds`: what a target other than `me` said, None when it
    could not be asked. `sure`: the view is older than news take to reach everybody.
    """
    others = [target for target in targets if target != me]
    said = [holds(target) for target in others]
    lacking = tuple(target for target, answer in zip(others, said, strict=True) if answer is False)
    safe = bool(targets) and all(said)
    if me in targets:
        before = targets.index(me)
        served = any(answer and states[target] is NodeState.ACTIVE for target, answer in list(zip(others, said, strict=True))[:before])
        return Verdict(() if served else lacking, False, safe)
    firm = all(states[target] is NodeState.ACTIVE for target in targets)
    mine = states.get(me, NodeState.QUARANTINED)
    return Verdict(lacking, safe and firm and sure and mine in (NodeState.ACTIVE, NodeState.JOINING), safe)


def extent_head(
    key: BlockKey,
    link: Link,
    extent_tokens: int,
    block_tokens: Callable[[BlockKey], int | None],
    known: dict[BlockKey, BlockKey | None],
) -> BlockKey | None:
    """The head of the extent of `key`, which is held here; None when the chain is broken before it. Found heads go to `known`.

    The tokens of a block follow from the depth of its parent; where that isn't held, `block_tokens` may know them.
    """
    path: list[BlockKey] = []
    at: BlockKey | None = key
    start = -1
    head: BlockKey | None = None
    while at is not None:
        if at in known:
            head = known[at]
            break
        found = link(at)
        if found is None:
            break
        parent, depth = found
        path.append(at)
        if start < 0:
            start = depth - depth % _span(at, found, link, extent_tokens, block_tokens)
        if depth <= start:
            head = at if depth == start else None
            break
        at = parent
    for passed in path:
        known[passed] = head
    return head


def _span(
    key: BlockKey, found: tuple[BlockKey | None, int], link: Link, extent_tokens: int, block_tokens: Callable[[BlockKey], int | None]
) -> int:
    """Tokens of a whole extent in the chain of `key`."""
    parent, depth = found
    above = link(parent) if parent is not None else None
    tokens = depth - above[1] if above is not None else block_tokens(key)
    return tokens * blocks_per_extent(tokens, extent_tokens) if tokens is not None and tokens > 0 else extent_tokens
