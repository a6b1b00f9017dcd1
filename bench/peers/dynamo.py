"""NVIDIA Dynamo's index of what workers hold (`RadixTree` of ai-dynamo-runtime), for `bench.router_index`: as Python sees it.

Cases: `find_SIZE_WORKERS` looks up hashes that are there already, `full_SIZE_WORKERS` hashes the tokens too (with a hash that is not
cryptographic), `tell_BLOCKS` applies 1,000 events of so many blocks, and waits until they are taken in.
"""

import importlib
import json
import random
from importlib.metadata import version
from typing import Any

from bench.peers.dynamo_shape import BLOCK_TOKENS, SIZES, TAIL, TOKENS, WORKERS, branch, parts, talks
from bench.peers.turns import Case, check, take_turns

_dynamo: Any = importlib.import_module("dynamo.llm")
_rng = random.Random(1)
DOCUMENT = [_rng.randrange(128_000) for _ in range(TOKENS)]
HASHES: list[int] = _dynamo.compute_block_hash_for_seq(DOCUMENT, BLOCK_TOKENS)


def own(count: int) -> list[int]:
    """Hashes that nobody else has."""
    return [_rng.getrandbits(63) for _ in range(count)]


def event(number: int, parent: int | None, hashes: list[int]) -> bytes:
    """An event that stores `hashes`."""
    blocks = [{"block_hash": one, "tokens_hash": one} for one in hashes]
    return json.dumps({"event_id": number, "data": {"stored": {"parent_hash": parent, "blocks": blocks}}, "dp_rank": 0}).encode()


class Tree:
    """One tree, told of `workers` on first use; `blocks` of theirs."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.blocks = self.number = 0
        self._tree: Any = None

    def events(self) -> list[tuple[int, bytes]]:
        """All that it is to be told, and by whom."""
        told: list[tuple[int, bytes]] = []
        self.blocks = 0
        for worker in range(self.workers):
            stretches = [(HASHES[a - 1] if a else None, HASHES[a:b]) for a, b in parts(self.workers, worker)]
            at = branch(self.workers, worker)
            stretches += [(HASHES[at - 1], own(TAIL)) for _ in range(talks(self.workers))]
            for parent, hashes in stretches:
                self.number += 1
                self.blocks += len(hashes)
                told.append((worker, event(self.number, parent, hashes)))
        return told

    @property
    def tree(self) -> Any:
        """The tree, full."""
        if self._tree is None:
            self._tree = self.fill(self.events())
            check(len(self._tree.find_matches(HASHES[:64]).scores) == self.workers, "not everybody is found")
        return self._tree

    def fill(self, events: list[tuple[int, bytes]]) -> Any:
        """A tree that has taken in `events`."""
        tree = _dynamo.RadixTree()
        for worker, raw in events:
            tree.apply_event(worker, raw)
        tree.find_matches(HASHES[:1])  # waits its turn behind them
        return tree


def cases(tree: Tree) -> dict[str, Case]:
    """What is asked of a tree."""
    made: dict[str, Case] = {}
    for name, size in SIZES.items():
        tokens, hashes = DOCUMENT[:size], HASHES[: size // BLOCK_TOKENS]

        def find(i: int, hashes: list[int] = hashes) -> object:
            return tree.tree.find_matches(hashes).scores

        def full(i: int, tokens: list[int] = tokens) -> object:
            return tree.tree.find_matches(_dynamo.compute_block_hash_for_seq(tokens, BLOCK_TOKENS)).scores

        made[f"find_{name}_{tree.workers}w"] = Case(find)
        made[f"full_{name}_{tree.workers}w"] = Case(full)
    return made


def told(blocks: int) -> Case:
    """1,000 events of `blocks` blocks an operation."""
    ready: dict[int, list[tuple[int, bytes]]] = {}
    tree = Tree(1)

    def prepare(coming: range) -> None:
        for number in coming:
            ready[number] = [(0, event(i, None, own(blocks))) for i in range(1000)]

    return Case(lambda i: tree.fill(ready.pop(i)), prepare=prepare)


if __name__ == "__main__":
    trees = {workers: Tree(workers) for workers in WORKERS}
    all_cases = {name: case for tree in trees.values() for name, case in cases(tree).items()}
    all_cases |= {f"tell_{blocks}": told(blocks) for blocks in (1, 16, 512)}
    take_turns("dynamo RadixTree", version("ai-dynamo-runtime"), all_cases)
