"""Running `kvpool bench pool`: who is measured, in which order; nothing is left behind."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from kvpool.block import Namespace
from kvpool.cli.admin import choose_nodes, open_members
from kvpool.cli.bench.caller import Admin, Caller
from kvpool.cli.bench.limits import memcpy, raw_tcp
from kvpool.cli.bench.local import LocalNode, identify
from kvpool.cli.bench.measure import Case, Measured, take_turns
from kvpool.cli.bench.plan import PoolCases, Shape, room, yardsticks
from kvpool.cli.bench.space import space_of
from kvpool.cli.credentials import security
from kvpool.cli.state import find_cluster
from kvpool.errors import KvpoolError, UnavailableError
from kvpool.units import MIB

_SPARE_S = 600.0
"""What is written lives this much longer than the run is to take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All cases, the ways that lead nowhere and why, and the room that the run took at most."""

    measured: Sequence[Measured]
    unreachable: dict[str, str]
    room_bytes: int

    def rows(self, shape: Shape) -> list[dict[str, Any]]:
        """The cases of one shape for programs, each with its speed beside the yardsticks', by the p50s."""
        rows = [one.as_json() for one in self.measured if (one.case.size, one.case.batch) == (shape.size, shape.batch)]
        times = {(row["way"], row["op"]): row["p50_us"] for row in rows}
        for row in rows:
            for yard, key in (("memcpy", "over_memcpy"), ("raw tcp", "over_raw_tcp")):
                row[key] = times[yard, row["op"]] / row["p50_us"]
        return rows

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        shapes = dict.fromkeys(Shape(one.case.size, one.case.batch) for one in self.measured)
        cases = [row for shape in shapes for row in self.rows(shape)]
        return {"cases": cases, "unreachable": self.unreachable, "room_bytes": self.room_bytes}


def run_local(shapes: Sequence[Shape], reaches: Sequence[str], seconds: float) -> Outcome:
    """On a node of its own."""
    spaces = _spaces(shapes, reaches)
    with LocalNode(2 * room(shapes, len(reaches)) + 256 * MIB) as node:
        return _run(node.address, [identify(node.address)], (node.pid,), spaces, shapes, seconds)


def run_on_cluster(cluster: str | None, shapes: Sequence[Shape], reaches: Sequence[str], seconds: float) -> Outcome:
    """On the cluster at a URL, or the local one."""
    spaces = _spaces(shapes, reaches)
    nodes = [identify(node.address, security()) for node in choose_nodes(open_members(cluster), None)]
    return _run(find_cluster(cluster), nodes, (), spaces, shapes, seconds)


Spaces = Mapping[str, Mapping[int, Namespace]]
"""By reach and size."""


def _spaces(shapes: Sequence[Shape], reaches: Sequence[str]) -> Spaces:
    """New ones. Raises `ConfigError` for a size that no block can have."""
    return {reach: {shape.size: space_of(shape.size) for shape in shapes} for reach in reaches}


def _run(source: str, nodes: Admin, servers: tuple[int, ...], spaces: Spaces, shapes: Sequence[Shape], seconds: float) -> Outcome:
    most = max(shape.nbytes for shape in shapes)
    ttl_s = _SPARE_S + 2 * seconds * len(shapes) * 2 * (2 + len(spaces))
    with ExitStack() as stack:
        copying, raw = stack.enter_context(memcpy(most)), stack.enter_context(raw_tcp(most))
        cases: dict[Shape, list[Case]] = {shape: yardsticks(shape, copying, raw) for shape in shapes}
        unreachable: dict[str, str] = {}
        for reach, by_size in spaces.items():
            try:
                callers = {
                    size: stack.enter_context(Caller(source, space, reach, nodes=nodes, security=security()))
                    for size, space in by_size.items()
                }
            except KvpoolError as error:
                unreachable[reach] = str(error)
                continue
            for shape in shapes:
                one = PoolCases(reach, shape, callers[shape.size], ttl_s, servers)
                stack.callback(one.remove)
                one.fill()
                cases[shape] += one.cases()
        if len(unreachable) == len(spaces):
            raise UnavailableError(f"the pool can't be reached from here: {'; '.join(f'{way}: {why}' for way, why in unreachable.items())}")
        measured = [one for shape in shapes for one in take_turns(cases[shape], seconds)]
    return Outcome(measured=measured, unreachable=unreachable, room_bytes=room(shapes, len(spaces) - len(unreachable)))
