"""Five nodes on five hosts under mixed load from four clients, hurt in turn: `python -m bench.faults [--seconds 30] [--json]`.

Hosts are network namespaces (`kvpool.testing.hosts`), so this needs root, and nothing else. Each fault is measured against the
time just before it: kill -9 of a node (with one copy of everything, then with two), SIGSTOP, a partition in one direction, a slow
link, the membership store killed and emptied, a rolling restart of all nodes; then a sixth node joins, and one of the first five is
drained and stopped. Blocks are checked word by word. What is asked of a row, and told in its last column:

  wrong bytes 0, failed requests 0; the hit rate falls by no more than the share of blocks that have no copy left; requests that
  don't concern the node in trouble have a p99 of at most 1.5 times the one before; the view settles within two leases;
  a join moves at most the newcomer's share of the nodes and 2 % more; after a join and a drain the books of all nodes add up, after
  the last row nothing is leased. While a node joins or drains no node is in trouble, but bytes move on the cores that serve requests:
  there the p99 is told and not judged.
"""

import argparse
import json
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.fault_rows import Row, balanced, between, row
from bench.report import print_json, print_table
from kvpool.errors import DeadlineError
from kvpool.policy.placement import PlacedNode, blocks_per_extent, place
from kvpool.testing.load import BLOCK_TOKENS
from kvpool.testing.world import LEASE_MS, World
from kvpool.units import SECOND

NODES, CLIENTS, VICTIM, NEWCOMER = 5, 4, 4, 5
SLOW_MBIT = 20
_SETTINGS = {"near_copies": "false", "hot_reads": "0"}
"""Copies that readers make for themselves would hide what is measured here."""
_LEASE_S = LEASE_MS / 1000
_SETTLED_S = 150.0
_DRAIN_S = 180

_HEADERS = [
    "fault", "copies", "requests", "failed", "wrong", "hit before", "during", "no copy left", "p99 ms before", "during", "of all",
    "settled s", "holds",
]  # fmt: skip


class Bench:
    """Hurts a world, one fault at a time. `copies` is how many there are of each block just now."""

    def __init__(self, world: World, seconds: float) -> None:
        self._world, self._seconds = world, seconds
        self.copies = 1

    def hurt(
        self,
        fault: str,
        act: Callable[[], None],
        heal: Callable[[], None] = lambda: None,
        *,
        troubled: Sequence[int] = (VICTIM,),
        gone: bool = False,
        nodes: Sequence[int] = range(NODES),
        after: Sequence[int] = range(NODES),
    ) -> Row:
        """Measure before, act, measure, heal, wait until all is well.

        `troubled`: the nodes whose requests may notice; `gone`: the view must do without the victim; `nodes`: those that take part
        meanwhile, `after`: those that are active in the end.
        """
        world, copies = self._world, self.copies
        ids = [world.ids[number] for number in nodes]
        time.sleep(self._seconds)
        act_ns = time.monotonic_ns()
        act()
        settle_s = None
        if gone:
            self._without_victim(fault)
            settle_s = (world.views[-1]["at_ns"] - act_ns) / SECOND
        time.sleep(max(0.0, self._seconds - (time.monotonic_ns() - act_ns) / SECOND))
        end_ns = time.monotonic_ns()
        heal()
        self.recover(after)
        done = tuple(world.done)
        return row(
            fault,
            between(done, act_ns - int(self._seconds * SECOND), act_ns),
            between(done, act_ns, end_ns),
            copies=copies,
            concerns=lambda chain: not world.holders(chain, copies, ids).isdisjoint(world.ids[number] for number in troubled),
            lost_blocks=lambda chain: self._lost(chain) if gone and copies == 1 else 0,
            settle_s=settle_s,
        )

    def _without_victim(self, fault: str) -> None:
        world, victim = self._world, self._world.ids[VICTIM]
        world.wait(lambda: world.states().get(victim) in (None, "quarantined"), f"{fault}: the view does without the victim")

    def _lost(self, chain: int) -> int:
        """Blocks of a prompt behind the first one that only the victim holds."""
        nodes = [PlacedNode(id=node_id) for node_id in self._world.ids[:NODES]]
        size = blocks_per_extent(BLOCK_TOKENS)
        keys = self._world.keys[chain]
        for number, one in enumerate(place(keys, size, nodes, 1)):
            if self._world.ids[VICTIM] in one.targets:
                return len(keys) - number * size
        return 0

    def recover(self, numbers: Sequence[int] = range(NODES)) -> None:
        """Wait until these nodes, and no others, are there and active."""
        world = self._world
        expected = {world.ids[number]: "active" for number in numbers}
        world.wait(lambda: world.states() == expected, "all nodes active again", 90)
        time.sleep(3)

    def fill(self) -> None:
        """Wait until every block is there as often as it should be, no more and no less: those that were lost must be asked for again."""
        world = self._world
        wanted = self.copies * sum(len(keys) for keys in world.keys)
        world.wait(lambda: sum(book["blocks"] for book in world.books().values()) == wanted, f"{wanted} copies of blocks", _SETTLED_S)

    def join(self) -> Row:
        """A sixth node comes, on a host of its own. Its share is counted when those that it displaced have let go."""
        world = self._world

        def come() -> None:
            world.start_node(NEWCOMER)
            self.recover(range(NODES + 1))
            self.fill()

        everybody = range(NODES + 1)
        found = self.hurt(f"join of a {NODES + 1}th", come, troubled=(NEWCOMER,), nodes=everybody, after=everybody)
        books = world.books()
        moved = books[world.ids[NEWCOMER]]["blocks"] / sum(book["blocks"] for book in books.values())
        return replace(found, moved_share=moved, fair_share=1 / (NODES + 1), balanced=balanced([*books.values()], idle=False))

    def drain(self) -> tuple[Row, float]:
        """The victim is drained and stopped, and the clients go home; the row, and how long the drain took in seconds."""
        world, took = self._world, list[float]()

        def drained() -> None:
            took.append(world.kvpool("drain", world.ids[VICTIM], "--deadline", f"{_DRAIN_S}s", limit_s=_DRAIN_S + 60)["seconds"])
            world.signal_node(VICTIM, signal.SIGTERM)
            self._without_victim("drain")

        left = [number for number in range(NODES + 1) if number != VICTIM]
        found = self.hurt("drain of one", drained, nodes=range(NODES + 1), after=left)
        world.rest()
        return replace(found, balanced=_comes_to_rest(world)), took[0]


def _comes_to_rest(world: World) -> bool:
    """Whether within a minute the books of all nodes add up and no lease is left: those of clients that are gone run out."""
    try:
        world.wait(lambda: balanced([*world.books().values()], idle=True), "balanced books without a lease")
    except DeadlineError:
        return False
    return True


def measure(world: World, seconds: float) -> tuple[list[Row], float]:
    """All faults in turn; rows, and the seconds that the drain took."""
    bench, hosts = Bench(world, seconds), world.hosts

    def signals(what: signal.Signals) -> Callable[[], None]:
        return lambda: world.signal_node(VICTIM, what)

    def restart() -> None:
        world.start_node(VICTIM)

    def rolling() -> None:
        for number in range(NODES):
            world.signal_node(number, signal.SIGTERM)
            world.start_node(number)
            bench.recover()

    rows = [bench.hurt("kill -9, one copy", signals(signal.SIGKILL), restart, gone=True)]
    bench.copies = 2
    world.configure({"copies": "2"})
    bench.fill()
    rows += [
        bench.hurt("kill -9", signals(signal.SIGKILL), restart, gone=True),
        bench.hurt("SIGSTOP", signals(signal.SIGSTOP), signals(signal.SIGCONT), gone=True),
        bench.hurt("partition, one direction", lambda: hosts.cut(hosts[0], hosts[VICTIM]), lambda: hosts.heal(hosts[0], hosts[VICTIM])),
        bench.hurt("slow link", lambda: hosts.slow(hosts[VICTIM], SLOW_MBIT), lambda: hosts.fast(hosts[VICTIM])),
        bench.hurt("store killed, empty again", world.kill_store, world.start_store, troubled=()),
        bench.hurt("rolling restart", rolling, troubled=range(NODES)),
        bench.join(),
    ]
    last, drain_s = bench.drain()
    return [*rows, last], drain_s


def run(seconds: float, chains: int, rate: float, logs: Path) -> dict[str, Any]:
    """One world, all faults; the result as `--json` prints it."""
    with World(nodes=NODES, clients=CLIENTS, chains=chains, rate=rate, capacity="256MiB", directory=logs) as world:
        world.start(NODES, 60 * seconds + 900, settings=_SETTINGS)
        try:
            rows, drain_s = measure(world, seconds)
        finally:
            done = tuple(world.done)
            (logs / "requests.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in done))
    unmet = [one.unmet(_LEASE_S) for one in rows]
    return {
        "wrong_bytes": sum(one.wrong for one in rows),
        "failed_requests": sum(one.failed for one in rows),
        "ok": not any(unmet),
        "rows": [
            {**asdict(one), "loss": one.loss, "untouched_p99_ratio": one.untouched_p99_ratio, "ok": not missing, "unmet": missing}
            for one, missing in zip(rows, unmet, strict=True)
        ],
        "join_moved_share": next(one.moved_share for one in rows if one.moved_share is not None),
        "drain_seconds": drain_s,
        "errors": sorted({one.error for one in done if one.error})[:10],
        "lease_s": _LEASE_S,
    }


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _cells(one: dict[str, Any]) -> list[object]:
    return [
        *(one[name] for name in ("fault", "copies", "requests", "failed", "wrong")),
        *(_number(one[name], 4) for name in ("hit_before", "hit_during")),
        _number(one["dead_share"], 3),
        *(_number(one[name], 1) for name in ("p99_before_ms", "p99_during_ms", "all_p99_ms", "settle_s")),
        "yes" if one["ok"] else f"no: {', '.join(one['unmet'])}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30, help="measured before and during each fault")
    parser.add_argument("--chains", type=int, default=120, help="prompts that the clients share")
    parser.add_argument("--rate", type=float, default=12, help="requests a second of each client")
    parser.add_argument("--logs", type=Path, help="keep what the processes say here")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logs = options.logs or Path(tempfile.mkdtemp(prefix="kvpool-faults-"))
    logs.mkdir(parents=True, exist_ok=True)
    result = run(options.seconds, options.chains, options.rate, logs)
    if options.logs is None:  # they stay when something went wrong
        shutil.rmtree(logs)
    print_table(_HEADERS, [_cells(one) for one in result["rows"]])
    print(f"the newcomer holds {result['join_moved_share']:.4f} of all copies; the drain took {result['drain_seconds']:.1f} s")
    if options.json:
        print_json(result)


if __name__ == "__main__":
    main()
