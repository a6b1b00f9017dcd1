"""kvpool's data plane beside what the machine can do and beside public stores, all in one run.

`python -m bench.pool [--peers] [--json] [--rounds 7]`. Every contestant is a process, and who serves it another one: a real node, a
peer's own servers, the far end of plain sockets. They take turns round by round, case by case; a figure is the median over the rounds of
each round's p50, beside the lowest and the highest, and a ratio is taken within each round. Yardsticks are one thread's memcpy between
shared and private memory, and blocking TCP sockets, each of the same number of buffers of the same size. Memory isn't equally fast
everywhere, so for kvpool's own gets by shared memory the thread copies the very blocks that are read, from where they lie to the same rows.
kvpool's blocks have exactly the size that is named, and their keys are made before; `_hashed` figures include the hashing of their tokens.
`_checked` ones are with every checksum on. CPU seconds are those of the client and of the node with its children while 32 x 1 MiB are read.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click

from bench import pool_crowd, pool_kill
from bench.peers.turns import COPIED
from bench.pool_figures import COLUMNS, Results, figures_of, headlines, table_row
from bench.pool_peers import PEERS, missing
from bench.pool_turns import Contestant, Turn, started
from bench.report import print_json, print_table
from kvpool.cli.bench.cpu import cpu_s_of
from kvpool.cli.bench.local import LocalNode
from kvpool.errors import KvpoolError
from kvpool.units import GIB

OPS = {
    COPIED: 6, "get_64k": 200, "get_64k_hashed": 200, "get_1m": 60, "get_32x1m": 6, "get_32x1m_hashed": 6, "put_64k": 100, "put_32x1m": 4,
    "probe512": 30, "probe512_hashed": 30, "view_32": 100,
}  # fmt: skip
"""Operations of a turn."""
IDLE_S, SPIN_S = 10.0, 2.0
YARDSTICKS = {kind: (sys.executable, "-m", "bench.pool_limits", kind) for kind in ("memcpy", "raw tcp")}
CLIENTS = {
    "kvpool shm": ("--reach", "shm"),
    "kvpool shm checked": ("--reach", "shm", "--checksums", "always"),
    "kvpool tcp": ("--reach", "tcp"),
}


def client(node: LocalNode, name: str, *flags: str) -> Sequence[str]:
    """The command of a client of `node`."""
    return (sys.executable, "-m", "bench.pool_client", node.address, str(node.pid), "--name", name, *flags)


def play(contestants: Sequence[Contestant], rounds: int) -> dict[tuple[str, str], list[Turn]]:
    """All turns; those of a first round warm up, uncounted."""
    turns: dict[tuple[str, str], list[Turn]] = {}
    for counted in [False] + [True] * rounds:
        for case, ops in OPS.items():
            for one in contestants:
                if case in one.cases:
                    turn = one.turn(case, ops)
                    if counted:
                        turns.setdefault((one.name, case), []).append(turn)
    return turns


def idle_cores(contestants: Sequence[Contestant]) -> dict[str, float]:
    """Cores that who serves each contestant uses while all are connected and nobody asks; one that spins has the machine for itself."""
    found = _idle([one for one in contestants if not one.spins], IDLE_S)
    for one in contestants:
        if one.spins:
            with one.awake():
                found |= _idle([one], SPIN_S)
    return found


def _idle(contestants: Sequence[Contestant], length_s: float) -> dict[str, float]:
    before = [cpu_s_of(one.servers) for one in contestants]
    time.sleep(length_s)
    return {one.name: (cpu_s_of(one.servers) - used) / length_s for one, used in zip(contestants, before, strict=True)}


def crowd(node: LocalNode, rounds: int, logs: Path) -> dict[str, object]:
    """Eight clients of `node` at once."""
    clients = {
        f"client {n}": client(node, f"client {n}", "--reach", "shm", "--crowd", "--space", "kvpool shm") for n in range(pool_crowd.CLIENTS)
    }
    with started(clients, logs) as (there, absent):
        if absent:
            raise KvpoolError(f"not all clients could be started: {absent}")
        return pool_crowd.measure(there, rounds)


@click.command()
@click.option("--peers", is_flag=True, help="Measure the public stores, too, those that are installed.")
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(5))
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
def main(peers: bool, rounds: int, as_json: bool) -> None:
    """Measure and print."""
    absent = missing() if peers else {}
    rivals = {name: peer.command for name, peer in PEERS.items() if peers and name not in absent}
    with tempfile.TemporaryDirectory(prefix="bench-pool-") as directory, LocalNode(4 * GIB) as node:
        logs = Path(directory)
        ours = {name: client(node, name, *flags) for name, flags in CLIENTS.items()}
        with started({**YARDSTICKS, **ours, **rivals}, logs) as (there, failed):
            absent |= failed
            idle = idle_cores(there)
            results = Results(play(there, rounds), {case: n for one in there for case, n in one.cases.items()}, idle)
            versions = {one.name: one.version for one in there}
        more = crowd(node, rounds, logs)
    try:
        more |= pool_kill.measure("tcp")
    except KvpoolError as error:
        absent["kill"] = str(error)
    report(results, versions, more, absent, rounds, as_json=as_json)


def report(
    results: Results, versions: dict[str, str], more: dict[str, object], absent: dict[str, str], rounds: int, *, as_json: bool
) -> None:
    """The table, and the JSON object if wanted."""
    named = {name: figures_of(results, name) for name in versions}
    rivals = [name for name in versions if name not in ("memcpy", "raw tcp") and not name.startswith("kvpool")]
    print(f"medians of {rounds} rounds of each round's p50; keys made before, so without hashing")
    print_table(COLUMNS, [table_row(name, found) for name, found in named.items()])
    found = {**headlines(results, rivals), **more}
    print()
    print_table(("figure", "median (range)"), list(found.items()))
    for name, why in absent.items():
        print(f"{name}: {why}")
    if as_json:
        said = {name: {"version": versions[name], **figures} for name, figures in named.items()}
        skipped = {name: {"skipped": why} for name, why in absent.items() if name in PEERS}
        print_json({
            "bench": "pool", "rounds": rounds, **found, "peers": {**{name: said[name] for name in rivals}, **skipped},
            "kvpool": {name: said[name] for name in said if name.startswith("kvpool")},
            "yardsticks": {name: said[name] for name in ("memcpy", "raw tcp")},
            "absent": {name: why for name, why in absent.items() if name not in PEERS},
        })  # fmt: skip


if __name__ == "__main__":
    main()
