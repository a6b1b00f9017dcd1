"""Five nodes on five hosts under mixed load from four clients, hurt in turn: `python -m bench.faults [--seconds 12] [--json]`.

Hosts are network namespaces (`kvpool.testing.hosts`), so this needs root, and nothing else. Each fault is measured against the
time just before it: kill -9 of a node (with one copy of everything, then with two), SIGSTOP, a partition in one direction, a slow
link, the membership store killed and emptied, a rolling restart of all nodes. Blocks are checked word by word. What is asked of a row:

  wrong bytes 0, failed requests 0; the hit rate falls by no more than the share of blocks that have no copy left; requests that
  don't concern the node in trouble have a p99 of at most 1.5 times the one before; the view settles within two leases.
"""

import argparse
import json
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.fault_rows import Row, between, row
from bench.fault_world import LEASE_MS, World
from bench.report import print_json, print_table
from kvpool.policy.placement import PlacedNode, blocks_per_extent, place
from kvpool.testing.load import BLOCK_TOKENS
from kvpool.units import SECOND

NODES, CLIENTS, VICTIM = 5, 4, 4
SLOW_MBIT = 20
_SETTINGS = {"near_copies": "false", "hot_reads": "0"}
"""Copies that readers make for themselves would hide what is measured here."""

_HEADERS = [
    "fault", "copies", "requests", "failed", "wrong", "hit before", "during", "no copy left", "p99 ms before", "during", "settled s",
]  # fmt: skip


class Bench:
    """Hurts a world, one fault at a time."""

    def __init__(self, world: World, seconds: float) -> None:
        self._world, self._seconds, self.rows = world, seconds, list[Row]()

    def hurt(self, fault: str, copies: int, act: Callable[[], None], heal: Callable[[], None], *, gone: bool, limit_s: float = 0.0) -> None:
        """Measure before, act, measure, heal, wait until all is well. `gone`: the view must do without the victim."""
        world = self._world
        time.sleep(self._seconds)
        act_ns = time.monotonic_ns()
        act()
        settle_s = None
        if gone:
            victim = world.ids[VICTIM]
            world.wait(lambda: world.states().get(victim) in (None, "quarantined"), f"{fault}: the view does without the victim")
            settle_s = (world.views[-1]["at_ns"] - act_ns) / SECOND
        time.sleep(max(0.0, self._seconds - (time.monotonic_ns() - act_ns) / SECOND))
        end_ns = time.monotonic_ns()
        heal()
        self.recover()
        self.rows.append(
            row(
                fault,
                between(world.done, act_ns - int(self._seconds * SECOND), act_ns),
                between(world.done, act_ns, end_ns),
                copies=copies,
                concerns=lambda chain: world.ids[VICTIM] in world.holders(chain, copies, NODES),
                lost_blocks=lambda chain: self._lost(chain) if gone and copies == 1 else 0,
                settle_s=settle_s,
            )
        )

    def _lost(self, chain: int) -> int:
        """Blocks of a prompt behind the first one that only the victim holds."""
        nodes = [PlacedNode(id=node_id) for node_id in self._world.ids[:NODES]]
        size = blocks_per_extent(BLOCK_TOKENS)
        keys = self._world.keys[chain]
        for number, one in enumerate(place(keys, size, nodes, 1)):
            if self._world.ids[VICTIM] in one.targets:
                return len(keys) - number * size
        return 0

    def recover(self) -> None:
        """Wait until all nodes are active."""
        world = self._world
        world.wait(lambda: world.states() == dict.fromkeys(world.ids[:NODES], "active"), "all nodes active again", 90)
        time.sleep(3)


def measure(world: World, seconds: float) -> list[Row]:
    """All faults in turn."""
    bench, hosts = Bench(world, seconds), world.hosts
    nothing = lambda: None  # noqa: E731

    def restart() -> None:
        world.start_node(VICTIM)

    bench.hurt("kill -9, one copy", 1, lambda: world.signal_node(VICTIM, signal.SIGKILL), restart, gone=True)
    world.configure({"copies": "2"})
    time.sleep(seconds)  # the second copies are made
    bench.hurt("kill -9", 2, lambda: world.signal_node(VICTIM, signal.SIGKILL), restart, gone=True)
    bench.hurt(
        "SIGSTOP", 2, lambda: world.signal_node(VICTIM, signal.SIGSTOP), lambda: world.signal_node(VICTIM, signal.SIGCONT), gone=True
    )
    bench.hurt(
        "partition, one direction",
        2,
        lambda: hosts.cut(hosts[0], hosts[VICTIM]),
        lambda: hosts.heal(hosts[0], hosts[VICTIM]),
        gone=False,
    )
    bench.hurt("slow link", 2, lambda: hosts.slow(hosts[VICTIM], SLOW_MBIT), lambda: hosts.fast(hosts[VICTIM]), gone=False)
    bench.hurt("store killed, empty again", 2, world.kill_store, world.start_store, gone=False)

    def rolling() -> None:
        for number in range(NODES):
            world.signal_node(number, signal.SIGTERM)
            world.start_node(number)
            bench.recover()

    bench.hurt("rolling restart", 2, rolling, nothing, gone=False)
    return bench.rows


def run(seconds: float, chains: int, rate: float, logs: Path) -> dict[str, Any]:
    """One world, all faults; the result as `--json` prints it."""
    with World(nodes=NODES, clients=CLIENTS, chains=chains, rate=rate, capacity="256MiB", directory=logs) as world:
        world.start(NODES, 40 * seconds + 600, settings=_SETTINGS)
        rows = measure(world, seconds)
        failures = [one.error for one in world.done if one.error]
        (logs / "requests.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in world.done))
    return {
        "wrong_bytes": sum(one.wrong for one in rows),
        "failed_requests": sum(one.failed for one in rows),
        "rows": [{**asdict(one), "loss": one.loss, "untouched_p99_ratio": one.untouched_p99_ratio} for one in rows],
        "errors": sorted(set(failures))[:10],
        "lease_s": LEASE_MS / 1000,
    }


def _cells(one: dict[str, Any]) -> list[object]:
    rates = [f"{one[name]:.4f}" for name in ("hit_before", "hit_during")]
    times = [f"{one[name]:.1f}" for name in ("p99_before_ms", "p99_during_ms")]
    settled = "-" if one["settle_s"] is None else f"{one['settle_s']:.1f}"
    return [
        *(one[name] for name in ("fault", "copies", "requests", "failed", "wrong")),
        *rates,
        f"{one['dead_share']:.3f}",
        *times,
        settled,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=12, help="measured before and during each fault")
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
    if options.json:
        print_json(result)


if __name__ == "__main__":
    main()
