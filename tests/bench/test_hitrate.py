"""The hit-rate bench: its JSON, and one answer however many processes work on it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.hitrate import measure
from bench.traces import read_trace

ROOT = Path(__file__).parents[2]


def small(tmp_path: Path, name: str = "t") -> str:
    lines = [{"timestamp": i, "input_length": 1500, "output_length": 1, "hash_ids": [i % 7, 10 + i % 7, 30 + i % 21]} for i in range(200)]
    path = tmp_path / f"{name}.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def run(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "bench.hitrate", *args], capture_output=True, text=True, cwd=ROOT)


def test_bench_prints_the_promised_keys_as_its_last_line(tmp_path: Path) -> None:
    """Other tools read them."""
    done = run("--trace", small(tmp_path), "--sizes", "5,20", "--json", "--processes", "2")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert {"infinite", "lru", "clock", "s3fifo", "lfu", "slru", "belady"} <= set(result)
    for name in ("lru", "clock", "s3fifo", "lfu", "slru", "belady"):
        assert set(result[name]) == {"5", "20"}
        assert {"token_hit", "block_hit", "gap_closed", "recompute_seconds_saved"} <= set(result[name]["5"])
    assert result["belady"]["20"]["gap_closed"] == 1
    assert result["lru"]["20"]["gap_closed"] == 0
    assert result["infinite"]["token_hit"] > result["belady"]["5"]["token_hit"] > 0


def test_bench_of_two_traces_prints_one_object_each(tmp_path: Path) -> None:
    """Traces are compared side by side."""
    done = run(
        "--trace", small(tmp_path), "--trace", small(tmp_path, "u"), "--sizes", "5", "--policies", "lru", "--json", "--processes", "1"
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["t"]["lru"] == result["u"]["lru"]


def test_measure_two_processes_find_what_one_finds(tmp_path: Path) -> None:
    """Splitting the work may change the time only."""
    trace = read_trace(small(tmp_path))
    one, two = (measure(trace, ["lru", "s3fifo", "temporal"], [5, 20], processes) for processes in (1, 2))
    assert {**one, "seconds": 0} == {**two, "seconds": 0}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--trace", "nowhere.jsonl"), "can't read trace"),
        (("--trace", "synthetic:1", "--policies", "lru,best"), "no eviction policy is called 'best'"),
        (("--trace", "synthetic:1", "--sizes", "0"), "invalid"),
        (("--trace", "synthetic:1", "--processes", "0"), "positive"),
    ],
)
def test_bench_wrong_argument_says_what_is_wrong(args: tuple[str, ...], message: str) -> None:
    """Before minutes of work, not after."""
    done = run(*args)
    assert done.returncode == 2
    assert message in done.stderr
