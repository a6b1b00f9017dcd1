"""A real node under fire: no reader gets a wrong byte, and every step by which that is so is needed."""

import json
import sys
from typing import Any

import pytest

from kvpool.errors import DeadlineError, KvpoolError, UnavailableError
from kvpool.request.pool import NodeDescription
from kvpool.testing.read_proof import Proof, Tally, main, prove
from kvpool.testing.read_proof_blocks import faults, fill, models
from kvpool.testing.read_proof_sabotage import SABOTAGES
from kvpool.transport.ucx.library import load_ucp
from kvpool.wire.pool_client import PoolRpc

LONGEST_S = 20.0


@pytest.mark.parametrize("reach", ["shm", "tcp"])
def test_readers_never_get_wrong_bytes_whatever_is_put_evicted_moved_stopped_and_killed(reach: str) -> None:
    """And nothing is held once they have gone."""
    tally = prove(6.0, readers=2, reach=reach)
    assert tally.what == []
    assert (tally.wrong, tally.left, tally.crashed, tally.unbalanced) == (0, {}, 0, 0)
    assert tally.as_expected
    assert tally.killed > 0
    assert min(tally.node[name] for name in ("evicted", "moved_bytes", "touches")) > 0
    assert tally.done["hits"] > 0
    assert (tally.done["viewed_blocks"] > 0) == (reach == "shm")


@pytest.mark.parametrize(("reach", "sabotage"), [(reach, name) for reach, names in SABOTAGES.items() for name in names])
def test_each_step_left_out_shows(reach: str, sabotage: str) -> None:
    """A proof that can't tell a careless reader from a careful one would be worth nothing."""
    if reach == "ucx":
        _need_ucx()
    tally = prove(LONGEST_S, readers=4, reach=reach, sabotage=sabotage)
    assert tally.wrong > 0
    assert tally.as_expected
    assert tally.what


def test_run_in_which_nothing_was_read_is_no_proof() -> None:
    """Nor is one whose processes broke down, or that left something held."""
    sound: dict[str, Any] = {"done": {"get_blocks": 1, "loaded_blocks": 1}, "node": {"evicted": 1}}
    assert _tally(**sound).as_expected
    assert not _tally().as_expected
    for bad in ({"crashed": 1}, {"left": {"holds": 1}}, {"unbalanced": 1}, {"wrong": 1}):
        assert not _tally(**sound, **bad).as_expected


def test_node_that_says_nothing_for_a_while_is_asked_again_and_one_that_has_ended_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy host may take the node longer to answer than a call waits; that must not cost a long run."""
    silent, describe = [DeadlineError("not now"), UnavailableError("nor now")], PoolRpc.describe

    async def late(rpc: PoolRpc, timeout_s: float) -> NodeDescription:
        if silent:
            raise silent.pop()
        return await describe(rpc, timeout_s)

    monkeypatch.setattr(PoolRpc, "describe", late)
    proof = Proof(Tally(reach="shm", sabotage="", readers=0), writers=0, capacity="4MiB", seed=1)
    try:
        proof.end()
        assert (proof.tally.unanswered, proof.tally.left, proof.tally.unbalanced) == (2, {}, 0)
        proof.node.process.kill()
        proof.node.process.wait()
        with pytest.raises(AssertionError, match="the node ended with -9"):
            proof.end()
    finally:
        proof.stop()


@pytest.mark.parametrize("at", [0, 8, 4096, 32 * 1024 - 8])
def test_every_word_is_looked_at(at: int) -> None:
    """Whose word it is is told, too."""
    model = models()[0]
    chain = next(chain for chain in model.chains if len(chain) > 1)
    rows = model.room(len(chain))
    fill(chain, rows)
    assert list(faults(chain, list(rows))) == []
    rows[1].reshape(-1).view("u8")[at // 8] = rows[0].reshape(-1).view("u8")[at // 8]
    (told,) = faults(chain, list(rows))
    assert "1 of 4096 words" in told
    assert chain[0][:4].hex() in told


def test_command_says_what_it_found_and_fails_when_that_is_not_as_expected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For those who run it for long and look at the end only."""
    command = ["read_proof", "--seconds", "0", "--readers", "0", "--writers", "0"]
    monkeypatch.setattr(sys, "argv", [*command, "--json"])
    with pytest.raises(SystemExit, match="1"):
        main()
    told = json.loads(capsys.readouterr().out)
    assert (told["wrong"], told["as_expected"], told["left"]) == (0, False, {})
    monkeypatch.setattr(sys, "argv", [*command, "--reach", "grpc", "--sabotage", "hold"])
    with pytest.raises(SystemExit, match="2"):
        main()


def _tally(**more: Any) -> Tally:
    return Tally(reach="shm", sabotage="", readers=1, **{"done": {"get_blocks": 0, "loaded_blocks": 0}, **more})


def _need_ucx() -> None:
    try:
        load_ucp()
    except KvpoolError as error:
        pytest.skip(f"needs UCX: {error}")
