"""A defect on purpose, and the hunt for it.

Theory. A checker is worth what it catches. A mutant is a set of replaced attributes, applied for the time of a `with` block; `seeds` is
within how many seeds, counting from 0, some world must end in a violation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvpool.testing.sim.run import Verdict, run_seed
from kvpool.testing.sim.world import draw_world

Patch = tuple[Any, str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One defect: what it is called, what it does, within how many seeds it dies, and how it is made.

    `needs`: a trouble of the disk (`world.TROUBLES`) without which nothing can come of it; seeds whose worlds lack it are passed over.
    """

    name: str
    what: str
    seeds: int
    patches: Callable[[], Sequence[Patch]]
    needs: str = ""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The defect is in place during the block."""
        before: list[Patch] = []
        try:
            for target, name, value in self.patches():
                before.append((target, name, target.__dict__[name]))
                setattr(target, name, value)
            yield
        finally:
            for target, name, value in reversed(before):
                setattr(target, name, value)

    def hunt(self, events: int, seeds: int | None = None) -> Verdict | None:
        """The first seed that notices, None when none of them does."""
        with self.applied():
            for seed in range(seeds or self.seeds):
                world = draw_world(seed)
                if self.needs and (world.below.kind != "ssd" or self.needs not in world.below.troubles):
                    continue
                verdict = run_seed(seed, events, world=world)
                if verdict.violation:
                    return verdict
        return None
