"""What became of blocks on the nodes: one outcome per block and node, as a table and for programs."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvpool.cli.admin import Answers, Chosen, block_name, key_json
from kvpool.cli.screen import new_table, print_answers, short_id

E = TypeVar("E", bound=enum.IntEnum)
ABSENT = "absent"
_COLOURS = {"evicted": "green", "held": "yellow", "refused": "red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """`by_block[i]`: node id -> the name of what became of `chosen.keys[i]` there; a node that didn't get so far isn't in it.

    `totals` counts copies, by name, without the absent ones; `absent` counts blocks that no node that answered holds.
    """

    chosen: Chosen
    by_block: tuple[Mapping[str, str], ...]
    totals: Mapping[str, int]
    absent: int
    errors: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        blocks = [{**key_json(self.chosen, index), "outcomes": dict(by_node)} for index, by_node in enumerate(self.by_block)]
        return {
            "model": self.chosen.model,
            "blocks": blocks,
            "totals": dict(self.totals),
            "absent": self.absent,
            "errors": dict(self.errors),
        }

    def show(self, title: str, summary: str) -> None:
        """For people: `summary`, and a row for each copy."""
        table = new_table(title, ("block", "node", "outcome"))
        for index, by_node in enumerate(self.by_block):
            copies = [(node, name) for node, name in by_node.items() if name != ABSENT]
            for node, name in copies:
                table.add_row(block_name(self.chosen, index), short_id(node), f"[{_COLOURS.get(name, 'default')}]{name}[/]")
            if not copies:
                table.add_row(block_name(self.chosen, index), "-", ABSENT)
        print_answers(table, self.errors, summary=summary)


def collect(chosen: Chosen, asked: Sequence[bytes], answers: Answers[list[E]], kinds: type[E]) -> Outcomes:
    """From one list a node, in the order `asked` (each key once), to what became of each block of `chosen`."""
    said = {node: dict(zip(asked, outcomes, strict=False)) for node, outcomes in answers.values.items()}
    by_block = tuple({node: by_key[key].name.lower() for node, by_key in said.items() if key in by_key} for key in chosen.keys)
    names = [kind.name.lower() for kind in kinds if kind.name.lower() != ABSENT]
    flat = [name for by_node in by_block for name in by_node.values()]
    absent = sum(set(by_node.values()) == {ABSENT} for by_node in by_block)
    totals = {name: flat.count(name) for name in names}
    return Outcomes(chosen=chosen, by_block=by_block, totals=totals, absent=absent, errors=answers.errors)
