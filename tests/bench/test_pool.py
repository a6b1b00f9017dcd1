"""The pool bench's own honesty: contestants do what they are told, figures follow from turns, and a peer that is missing is named."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.peers.turns import COPIED
from bench.pool_crowd import _rate
from bench.pool_figures import COLUMNS, Results, figures_of, headlines, table_row
from bench.pool_peers import PEERS, missing
from bench.pool_turns import Contestant, Turn, started, take_turn
from bench.report import Spread
from kvpool.errors import DeadlineError, UnavailableError
from kvpool.units import GIB, MIB

TOY = """
import subprocess, sys, time
from bench.peers.turns import Case, take_turns
log = []
print("a library says hello")
def run(i):
    log.append(f"run {i}")
    sum(range(100_000))
def finish():
    print("finished", flush=True)
    open(sys.argv[1], "a").write("\\n".join(log) + "\\n")
    log.clear()
child = subprocess.Popen(["sleep", "600"])
case = Case(run, 1000, finish, lambda coming: log.append(f"{coming.start}..{coming.stop}"))
take_turns("toy", "1.2", {"get_64k": case}, [child.pid], **({"spins": True} if "spins" in sys.argv else {}))
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "toy.log"


@pytest.fixture
def toy(tmp_path: Path, log: Path) -> Iterator[Contestant]:
    one = Contestant((sys.executable, "-c", TOY, str(log)), tmp_path / "errors")
    one.wait_ready()
    yield one
    one.close()


def test_contestant_says_who_it_is_past_what_libraries_print(toy: Contestant) -> None:
    """A line on standard output that is no answer is not taken for one."""
    assert (toy.name, toy.version, dict(toy.cases), toy.spins) == ("toy", "1.2", {"get_64k": 1000}, False)
    assert len(toy.servers) == 1


def test_turn_runs_each_number_once_and_does_not_count_the_first(toy: Contestant, log: Path) -> None:
    """The one that warms up is run, not counted, and no number comes back in the next turn."""
    first, second = toy.turn("get_64k", 3), toy.turn("get_64k", 1)
    assert (len(first.seconds), len(second.seconds)) == (3, 1)
    assert min(first.seconds) > 0
    assert first.client_cpu_s > 0
    assert first.server_cpu_s < 0.5
    assert log.read_text().splitlines() == ["0..4", "run 0", "run 1", "run 2", "run 3", "4..6", "run 4", "run 5"]


def test_several_work_between_the_same_two_times(toy: Contestant, tmp_path: Path) -> None:
    """A crowd begins together and stops by itself."""
    other = Contestant((sys.executable, "-c", TOY, str(tmp_path / "other")), tmp_path / "errors2")
    try:
        other.wait_ready()
        start = time.monotonic() + 0.2
        turns = list(take_turn([toy, other], {"case": "get_64k", "start": start, "stop": start + 0.2}))
        assert time.monotonic() >= start + 0.2
        assert all(len(turn.seconds) > 1 for turn in turns)
    finally:
        other.close()


def test_contestant_that_spins_sleeps_between_its_turns(tmp_path: Path, log: Path) -> None:
    """Else it would take a core from everybody else."""
    one = Contestant((sys.executable, "-c", TOY, str(log), "spins"), tmp_path / "errors")
    try:
        one.wait_ready()
        state = Path(f"/proc/{one.servers[0]}/stat")
        _until(lambda: _state(state) == "T", "it sleeps before its first turn")
        assert len(one.turn("get_64k", 2).seconds) == 2
        _until(lambda: _state(state) == "T", "it sleeps after its turn")
        with one.awake():
            _until(lambda: _state(state) != "T", "it is let run")
    finally:
        one.close()


def test_close_ends_what_a_contestant_has_started(toy: Contestant) -> None:
    """Peers leave servers behind; the bench doesn't."""
    child = toy.servers[0]
    toy.close()
    _until(lambda: not _alive(child), "the contestant's child has ended")


def test_who_can_not_start_is_missing_with_its_last_words_and_the_others_play(tmp_path: Path) -> None:
    """One peer that doesn't run on this machine is no reason to measure none."""
    bad = (sys.executable, "-c", "raise SystemExit('no such card')")
    commands = {"bad": bad, "toy": (sys.executable, "-c", TOY, str(tmp_path / "log"))}
    with started(commands, tmp_path) as (there, absent):
        assert [one.name for one in there] == ["toy"]
        assert absent == {"bad": "no such card"}


def test_silence_ends_with_the_deadline(toy: Contestant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that hangs must not hang the bench."""
    monkeypatch.setattr("bench.pool_turns.TURN_S", 0.05)
    with pytest.raises(DeadlineError, match="took too long"):
        toy.answer()


def test_end_in_a_turn_is_an_error_with_the_last_words(toy: Contestant) -> None:
    """A case that fails ends its process; its figures aren't taken from what came before."""
    with pytest.raises(UnavailableError, match="KeyError"):
        toy.turn("unknown", 1)


def turns(*p50s: float, cpu: tuple[float, float] = (0.1, 0.3)) -> list[Turn]:
    return [Turn((p50 / 2, p50, p50 * 9), *cpu) for p50 in p50s]


@pytest.fixture
def results() -> Results:
    batch = 32 * MIB
    return Results(
        {
            ("memcpy", "get_32x1m"): turns(1.0, 2.0, 3.0),
            ("raw tcp", "get_32x1m"): turns(4.0, 4.0, 4.0),
            ("kvpool shm", "get_32x1m"): turns(2.0, 2.0, 2.0),
            ("kvpool shm", COPIED): turns(3.0, 3.0, 3.0),
            ("kvpool shm", "get_64k"): turns(1e-5, 3e-5, 2e-5),
            ("kvpool tcp", "get_32x1m"): turns(8.0, 4.0, 2.0),
            ("slow", "get_32x1m"): turns(9.0, 9.0, 9.0),
            ("quick", "get_32x1m"): turns(3.0, 3.0, 4.0),
        },
        {"get_32x1m": batch, "get_64k": 65536},
        {"kvpool shm": 0.002},
    )


def test_ratios_are_taken_within_a_round(results: Results) -> None:
    """What the machine did in one round is not compared with another."""
    assert results.over("kvpool shm", "memcpy", "get_32x1m") == Spread(median=1.0, low=0.5, high=1.5)
    assert results.over("kvpool tcp", "raw tcp", "get_32x1m") == Spread(median=1.0, low=0.5, high=2.0)


def test_cpu_counts_client_and_server_by_the_bytes_that_were_moved(results: Results) -> None:
    """Three operations of 32 MiB a turn."""
    assert results.cpu_s_per_gib("kvpool shm", "get_32x1m").median == pytest.approx(0.4 / (3 * 32 * MIB / GIB))


def test_headlines_have_what_was_measured_and_only_that(results: Results) -> None:
    """A case that is missing has no figure, not a zero; the best peer is the one with the highest rate."""
    found = headlines(results, ["slow", "quick", "absent"])
    assert set(found) == {
        "shm_get_64k_us", "shm_get_32x1m_over_memcpy", "shm_get_32x1m_over_memcpy_elsewhere", "tcp_get_32x1m_over_raw",
        "cpu_s_per_gib", "idle_cores", "best_peer", "shm_get_32x1m_over_best_peer",
    }  # fmt: skip
    assert found["best_peer"] == "quick"
    assert found["shm_get_32x1m_over_memcpy"] == Spread(median=1.5, low=1.5, high=1.5)  # of the copies of the same blocks
    small = found["shm_get_64k_us"]
    assert isinstance(small, Spread)
    assert (small.low, small.median, small.high) == pytest.approx((10, 20, 30))
    assert found["idle_cores"] == 0.002
    assert "best_peer" not in headlines(results, [])


def test_table_row_has_a_cell_for_each_column(results: Results) -> None:
    """And a dash where nothing was measured."""
    row = table_row("kvpool shm", figures_of(results, "kvpool shm"))
    assert len(row) == len(COLUMNS)
    cells = dict(zip(COLUMNS, row, strict=True))
    shown = [cells[column] for column in ("client", "64K us", "1M us", "x memcpy", "idle cores")]
    assert shown == ["kvpool shm", "20", "-", "1", "0.002"]


def test_crowd_rate_is_the_sum_of_the_clients_rates() -> None:
    """A client that got half as much has half the rate; who waited longest doesn't hide behind the average."""
    assert _rate([Turn((1.0, 1.0), 0, 0), Turn((2.0,), 0, 0)], 10) == 15.0


def test_peer_that_is_not_installed_is_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table without a peer says so, and how to have it."""
    monkeypatch.setenv("PEERS_HOME", str(tmp_path))
    absent = missing()
    assert set(absent) == set(PEERS)
    assert f"-m venv {tmp_path}/v-redis && {tmp_path}/v-redis/bin/pip install redis hiredis" in absent["redis"]
    python = tmp_path / "v-redis" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert "redis" not in missing()


def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, f"not so: {what}"
        time.sleep(0.01)


def _state(stat: Path) -> str:
    return stat.read_text().rsplit(")", 1)[1].split()[0]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return _state(Path(f"/proc/{pid}/stat")) != "Z"
