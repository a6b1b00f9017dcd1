"""The ring of explained decisions: found by either id, bounded in every direction, told in full and to the right people."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from kvpool.cli.main import cli
from kvpool.clock import ManualClock
from kvpool.policy.routing.values import Ask, Candidate, Ranking, Scored, Source, Tier, WorkerRef
from kvpool.request import FinishReason, TokenSources
from kvpool.security.salt import Salts
from kvpool.security.tokens import TokenTable, new_token
from kvpool.wire.guard import OPEN, Guard
from router.decisions import Decisions, spelled
from router.decisions.ring import MAX_CANDIDATES, MAX_NOTES
from router.job import Trace
from router.testing.cluster import ScriptedCluster
from router.testing.model import tiny_model
from router.testing.server import Running, serving

WORKERS = [WorkerRef("decode", f"{number:032x}", 1) for number in range(40)]
ASK = Ask(request_id="job", prompt_tokens=100, output_tokens=10)


def _ranking(count: int = 2) -> Ranking:
    pool = (Source(Tier.SSD, False, 16),)
    scored = (
        Scored(
            Candidate(worker=worker, resident_tokens=32, pool=pool, active=3), 0.25 + number, (("queue", 0.25), ("compute", float(number)))
        )
        for number, worker in enumerate(WORKERS[:count])
    )
    return Ranking("ours", "s", tuple(scored))


def _began(decisions: Decisions, name: str, tenant: str | None = None) -> Trace:
    trace = Trace(arrived_ns=0)
    decisions.began(name, answer_id=name, request_id=f"caller-{name}", tenant=tenant, trace=trace)
    return trace


def test_request_is_told_in_full() -> None:
    """Every candidate with its terms, who was chosen, and what happened, while it runs and afterwards."""
    clock = ManualClock()
    decisions = Decisions(clock)
    trace = _began(decisions, "a")
    clock.advance(2_500_000)
    decisions.note("a", "decode", ASK, _ranking(), WORKERS[1])
    found = decisions.find("caller-a")
    assert found is not None
    job = spelled(found)["jobs"][0]
    assert job["running"]
    decision = job["decisions"][0]
    assert (decision["at_ms"], decision["role"], decision["policy"], decision["unit"]) == (2.5, "decode", "ours", "s")
    assert decision["chosen"] == WORKERS[1].id
    assert [candidate["terms"] for candidate in decision["candidates"]] == [{"queue": 0.25, "compute": n} for n in (0.0, 1.0)]
    assert decision["candidates"][0]["pool"] == [{"tier": "ssd", "near": False, "tokens": 16}]
    trace.generated.extend([1, 2, 3])
    trace.reason, trace.decode_worker, trace.sources = FinishReason.STOP, WORKERS[1].id, TokenSources(pool=16, computed=84)
    decisions.ended("a", trace)
    job = spelled(found)["jobs"][0]
    assert not job["running"]
    assert (job["happened"]["generated"], job["happened"]["finish_reason"]) == (3, "stop")
    assert job["happened"]["sources"]["computed"] == 84
    assert "token_ids" not in job["happened"]


def test_all_answers_of_a_request_are_found_under_it() -> None:
    """By the caller's id or the answer's; an id that a caller uses twice stands for the later request."""
    decisions = Decisions(ManualClock())
    for job in ("a", "a.1"):
        decisions.began(job, answer_id="a", request_id="mine", tenant=None, trace=Trace(arrived_ns=0))
    found = decisions.find("a")
    assert found is not None
    assert (found, list(found.jobs)) == (decisions.find("mine"), ["a", "a.1"])
    decisions.began("b", answer_id="b", request_id="mine", tenant=None, trace=Trace(arrived_ns=0))
    assert decisions.find("mine") is decisions.find("b")
    assert decisions.find("c") is None


def test_ring_is_bounded_in_requests_choices_and_candidates() -> None:
    """What leaves is forgotten under all its names, and late notes for it are nobody's."""
    decisions = Decisions(ManualClock(), capacity=2)
    traces = {name: _began(decisions, name) for name in "abc"}
    assert decisions.find("a") is decisions.find("caller-a") is None
    decisions.note("a", "decode", ASK, _ranking(), None)
    decisions.ended("a", traces["a"])
    for _ in range(MAX_NOTES + 3):
        decisions.note("b", "decode", ASK, _ranking(40), WORKERS[30])
    found = decisions.find("b")
    assert found is not None
    job = found.jobs["b"]
    assert (len(job.notes), job.dropped) == (MAX_NOTES, 3)
    kept = [scored.worker for scored in job.notes[0].ranking.scored]
    assert kept == [*WORKERS[:MAX_CANDIDATES], WORKERS[30]]
    assert job.notes[0].left_out == 40 - MAX_CANDIDATES - 1
    assert not vars_of(decisions, "a")


def vars_of(decisions: Decisions, name: str) -> list[str]:
    """Where `name` is still held."""
    return [field for field, held in vars(decisions).items() if isinstance(held, dict) and any(name == key for key in held)]


@contextlib.asynccontextmanager
async def _router(directory: Path, guard: Guard = OPEN) -> AsyncIterator[Running]:
    (directory / "model").mkdir()
    async with serving(tiny_model(directory / "model"), ScriptedCluster("tiny"), guard=guard) as running:
        decisions = running.services.decisions
        trace = _began(decisions, "a", tenant="acme")
        decisions.note("a", "prefill", ASK, _ranking(), WORKERS[0])
        decisions.ended("a", trace)
        yield running


async def test_explanation_is_for_operators_and_the_requests_own_tenant(tmp_path: Path) -> None:
    """To anybody else it is a request that never was."""
    (tmp_path / "secret").write_bytes(b"s" * 40)
    keys = {}
    for name, tenant, rights in (("own", "acme", ["read"]), ("other", "evil", ["read"]), ("op", None, ["admin"]), ("free", None, ["read"])):
        _, keys[name] = new_token(tmp_path / "tokens", name=name, tenant=tenant, rights=rights, now_s=0)
    guard = Guard(tokens=TokenTable(tmp_path / "tokens"), salts=Salts(tmp_path / "secret"))
    async with _router(tmp_path, guard) as running, httpx.AsyncClient(base_url=running.url, timeout=30) as http:
        found = {}
        for name, key in keys.items():
            response = await http.get("/kvpool/explain/caller-a", headers={"authorization": f"Bearer {key}"})
            found[name] = (response.status_code, response.json())
        assert {name: status for name, (status, _) in found.items()} == {"own": 200, "other": 404, "op": 200, "free": 404}
        assert found["own"][1]["jobs"][0]["decisions"][0]["chosen"] == WORKERS[0].id
        assert found["other"][1]["error"]["code"] == "request_not_found"
        assert (await http.get("/kvpool/explain/caller-a")).status_code == 401


async def test_explain_prints_candidates_terms_choice_and_end(tmp_path: Path) -> None:
    """The command an operator types, against a router on a socket."""
    async with _router(tmp_path) as running:
        result = await asyncio.to_thread(CliRunner().invoke, cli, ["explain", "caller-a", "--router", running.url])
        assert result.exit_code == 0, result.output
        for word in (
            "prefill",
            "100 prompt tokens",
            "policy ours",
            "queue",
            "compute",
            "->",
            WORKERS[0].id[:8],
            "ended",
            "0 tokens generated",
        ):
            assert word in result.output
        told = await asyncio.to_thread(CliRunner().invoke, cli, ["explain", "nobody", "--router", running.url])
        assert (told.exit_code, "request_not_found" in told.output) == (1, True)


@pytest.mark.parametrize("count", [1, MAX_CANDIDATES])
def test_short_rankings_are_kept_as_they_are(count: int) -> None:
    """Nothing is copied that needn't be."""
    decisions, ranking = Decisions(ManualClock()), _ranking(count)
    _began(decisions, "a")
    decisions.note("a", "decode", ASK, ranking, WORKERS[0])
    found = decisions.find("a")
    assert found is not None
    assert found.jobs["a"].notes[0].ranking is ranking
