"""`kvpool bench pool`: what it measures is what it says, on a real node, and nothing of it is left in the pool."""

import asyncio
import json
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
from click.testing import CliRunner

from kvpool.block import KEY_BYTES
from kvpool.cli.bench.limits import memcpy, raw_tcp
from kvpool.cli.bench.local import LocalNode, identify
from kvpool.cli.bench.measure import SLICES, Case, Measured, take_turns
from kvpool.cli.bench.plan import PUT_ROOM, Shape, room
from kvpool.cli.bench.space import BLOCK_TOKENS, chain_of, space_of, stamp, stamped, tokens_of, wipe
from kvpool.cli.main import cli
from kvpool.cluster import open_membership
from kvpool.errors import ConfigError, UnavailableError
from kvpool.request.pool import NodeDescription
from kvpool.units import GIB, KIB, MIB
from kvpool.wire.pool_client import PoolRpc


@pytest.fixture(scope="module")
def node() -> Iterator[LocalNode]:
    with LocalNode(64 * MIB) as node:
        yield node


def describe(node: LocalNode) -> NodeDescription:
    async def ask() -> NodeDescription:
        rpc = PoolRpc(node.address)
        try:
            return await rpc.describe(10)
        finally:
            await rpc.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("size", [64, 4096, 64 * KIB, 288 * KIB, MIB, 16 * MIB, 3 * 64])
def test_space_has_blocks_of_exactly_the_size(size: int) -> None:
    """A figure for 64 KiB is of 64 KiB, and no two runs share a namespace."""
    assert space_of(size).geometry.payload_bytes(BLOCK_TOKENS) == size
    assert space_of(size).fingerprint() != space_of(size).fingerprint()
    assert space_of(size, salt=b"one").fingerprint() == space_of(size, salt=b"one").fingerprint()


@pytest.mark.parametrize("size", [1, 63, 65, 0])
def test_space_of_an_impossible_size_is_refused(size: int) -> None:
    """Not rounded to something else."""
    with pytest.raises(ConfigError, match="multiple of 64"):
        space_of(size)


def test_chains_share_no_block_and_a_shorter_one_is_the_start_of_a_longer() -> None:
    """So that what is stored once serves every batch, and a put is of something new."""
    space = space_of(4096)
    chains = [chain_of(space, number, 4) for number in range(5)]
    assert len({key for chain in chains for key in chain}) == 20
    assert chain_of(space, 3, 1) == chains[3][:1]
    assert len(tokens_of(3, 4)) == 4 * BLOCK_TOKENS
    assert {len(key) for key in chains[0]} == {KEY_BYTES}


def test_stamp_tells_chains_and_rows_apart() -> None:
    """Bytes of another chain, another row or nobody's are not taken for the right ones."""
    rows = np.zeros((3, 64), np.uint8)
    assert not stamped(rows, 0)
    assert stamped(stamp(rows, 7), 7)
    assert not stamped(rows, 6)
    assert not stamped(rows[1:], 7)
    assert stamped(rows[:2], 7)
    wipe(rows)
    assert not stamped(rows, 7)


def test_yardsticks_move_the_bytes_of_every_buffer() -> None:
    """A yardstick that moves less than it is timed for would flatter nobody but itself."""
    rows = stamp(np.zeros((4, 4096), np.uint8), 5)
    back = np.zeros_like(rows)
    with memcpy(MIB) as copying, raw_tcp(MIB) as raw:
        for one in (copying, raw):
            one.write(rows, 8192)
            wipe(back)
            one.read(back, 8192)
            assert stamped(back, 5)
            one.read(back[:1], 8192 + 2 * 4096)
            assert (back[0] == rows[2]).all()


def test_turns_are_counted_from_where_the_last_slice_ended() -> None:
    """A put numbered twice would find its blocks there and copy nothing."""
    seen: list[int] = []
    announced: list[int] = []
    ends: list[int] = []
    case = Case(
        way="toy", op="put", size=10, batch=2, run=seen.append, prepare=announced.extend, finish=lambda: ends.append(len(seen)), most=3
    )
    (one,) = take_turns([case], 60.0)
    assert seen == announced == list(range(SLICES * 4))
    assert ends == [4, 8, 12, 16, 20]
    assert len(one.seconds) == SLICES * 3


def test_turn_ends_with_its_time_after_at_least_one_run() -> None:
    """A slow way is measured, too, and no longer than it was given."""
    seen: list[int] = []
    (one,) = take_turns([Case(way="toy", op="get", size=10, batch=1, run=seen.append)], 1e-9)
    assert len(one.seconds) == SLICES
    assert seen == list(range(2 * SLICES))


def test_figures_follow_from_the_seconds() -> None:
    """Percentiles are those of runs, a rate is all bytes by all time, CPU time is by GiB."""
    case = Case(way="toy", op="get", size=GIB // 4, batch=2, run=lambda i: None, servers=(1,))
    one = Measured(case, [float(second) for second in range(100, 0, -1)], 25.0, 50.0)
    row = one.as_json()
    assert (row["p50_us"], row["p90_us"], row["p99_us"]) == (51e6, 91e6, 100e6)
    assert row["gbps"] == pytest.approx(50 * GIB / 5050 / 1e9)
    assert (row["client_cpu_s_per_gib"], row["server_cpu_s_per_gib"], row["runs"]) == (0.5, 1.0, 100)
    unknown = Measured(Case(way="toy", op="get", size=1, batch=1, run=lambda i: None), [1.0])
    assert unknown.as_json()["server_cpu_s_per_gib"] is None


def test_room_covers_what_is_read_and_the_puts_of_a_slice() -> None:
    """The promise to the pool: never more than this at a time."""
    shapes = [Shape(MIB, 1), Shape(MIB, 32)]
    assert (shapes[0].sets, shapes[1].sets, shapes[1].puts) == (128, 4, 7)
    assert room(shapes, 1) == 2 * 128 * MIB + PUT_ROOM
    assert room(shapes, 3) == 6 * 128 * MIB + PUT_ROOM
    assert Shape(4096, 32).puts == 127
    assert Shape(GIB, 1).puts == 1
    assert room([Shape(GIB, 1)], 1) == 130 * GIB


def test_local_run_measures_every_way_that_is_asked_for() -> None:
    """A node for the occasion, whose CPU time is known; ways are compared with the yardsticks of their own direction."""
    flags = ("--local", "--sizes", "4KiB,64", "--batch", "2", "--reach", "grpc,shm", "--seconds", "0.05", "--json")
    result = CliRunner().invoke(cli, ["bench", "pool", *flags])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["unreachable"] == {}
    assert told["room_bytes"] == room([Shape(64, 2), Shape(4096, 2)], 2)
    cases = {(case["size"], case["way"], case["op"]): case for case in told["cases"]}
    ways = ("memcpy", "raw tcp", "grpc", "shm")
    assert set(cases) == {(size, way, op) for size in (64, 4096) for way in ways for op in ("get", "put")}
    for (_, way, _), case in cases.items():
        assert case["runs"] >= SLICES
        assert 0 < case["p50_us"] <= case["p90_us"] <= case["p99_us"]
        assert (case["server_cpu_s_per_gib"] is None) == (way == "memcpy")
        yard = cases[case["size"], "memcpy", case["op"]]
        assert case["over_memcpy"] == pytest.approx(yard["p50_us"] / case["p50_us"])


def test_run_on_a_cluster_leaves_nothing_in_it(node: LocalNode) -> None:
    """What others have stays, what the run wrote goes; a way that leads nowhere is named, not hidden."""
    url = f"memory://bench-{uuid.uuid4().hex[:8]}"
    identity = identify(node.address)[1]
    before = describe(node)
    with open_membership(url) as membership:
        info = {"incarnation": str(identity.incarnation)}
        membership.join(role="node", id=identity.node_id, address=node.address, info=info)
        flags = ("--sizes", "4KiB", "--batch", "1,3", "--reach", "shm,ucx", "--seconds", "0.05")
        result = CliRunner().invoke(cli, ["bench", "pool", "--cluster", url, *flags])
    assert result.exit_code == 0, result.output
    assert "3 x 4.00 KiB" in result.output
    assert "has removed what it wrote" in result.output
    after = describe(node)
    assert (after.blocks, after.used_bytes) == (before.blocks, before.used_bytes)
    assert after.counters["inserted"] > before.counters["inserted"]


def test_no_way_at_all_is_an_error_that_says_why(node: LocalNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than a table of yardsticks."""

    def refuse(*args: object, **named: object) -> None:
        raise UnavailableError("no such way")

    monkeypatch.setattr("kvpool.cli.bench.runner.Caller", refuse)
    result = CliRunner().invoke(cli, ["bench", "pool", "--local", "--sizes", "64", "--batch", "1", "--reach", "shm"])
    assert result.exit_code == 1
    assert "can't be reached from here: shm: no such way" in result.output


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--local", "--sizes", "0"), "above 0"),
        (("--local", "--sizes", ","), "above 0"),
        (("--local", "--sizes", "100"), "multiple of 64"),
        (("--local", "--batch", "two"), "not a number of blocks"),
        (("--local", "--reach", "pigeon"), "--reach takes"),
        (("--local", "--reach", ""), "--reach takes"),
        (("--local", "--cluster", "memory://x"), "either --cluster URL or --local"),
        ((), "no local cluster is running"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags: tuple[str, ...], words: str) -> None:
    """Before anything is started or written."""
    result = CliRunner().invoke(cli, ["bench", "pool", *flags])
    assert result.exit_code == 1
    assert words in result.output


def test_local_node_that_can_not_start_says_why() -> None:
    """Its log is gone with it."""
    with pytest.raises(UnavailableError, match="nonsense"):
        LocalNode(64 * MIB, ("--policy", "nonsense"))


def test_get_of_something_else_is_noticed(node: LocalNode) -> None:
    """A fast way to the wrong bytes is no way."""
    from kvpool.cli.bench.caller import Caller
    from kvpool.cli.bench.plan import PoolCases

    space = space_of(4096)
    with Caller(node.address, space, "shm", nodes=[identify(node.address)]) as caller:
        one = PoolCases("shm", Shape(4096, 2), caller, 60, (node.pid,))
        one.fill()
        get, _ = one.cases()
        get.run(1)
        get.finish()
        one._last = 2
        with pytest.raises(UnavailableError, match="other bytes"):
            get.finish()
        one.remove()
        with pytest.raises(UnavailableError, match="only 0 of 2 blocks"):
            get.run(1)
