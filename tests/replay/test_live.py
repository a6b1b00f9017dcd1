"""A trace sent to a real router on a socket, over scripted workers."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from click.testing import Result as CliResult

from kvpool.cli.main import cli
from kvpool.errors import ConfigError, UnavailableError
from kvpool.replay.live import Caller, Endpoint, Plan, report, run
from kvpool.replay.live.caller import Result
from kvpool.replay.live.run import Sent
from kvpool.replay.traces import Trace, make_trace
from kvpool.replay.traces.values import RawRequest
from router.settings import Limits
from router.testing.cluster import ScriptedCluster
from router.testing.model import tiny_model
from router.testing.server import Running, serving
from router.testing.workers import Fault, ScriptedWorker


def _trace(*raws: RawRequest, block_tokens: int = 16) -> Trace:
    return make_trace("made", "own", block_tokens, raws)


TRACE = _trace(
    RawRequest(0, 40, 4, ("a", "b", "c"), "s"), RawRequest(50_000_000, 36, 6, ("a", "b", "d"), "s"), RawRequest(10**8, 20, 2, ())
)


@contextlib.asynccontextmanager
async def _router(tmp_path: Path, limits: Limits | None = None) -> AsyncIterator[tuple[Running, ScriptedWorker]]:
    model = tiny_model(tmp_path)
    cluster, worker = ScriptedCluster(model.name, max_tokens=200), ScriptedWorker(lambda prompt, position: 70, cached=16)
    cluster.add("decode", worker)
    async with serving(model, cluster, limits=limits) as running:
        yield running, worker


async def test_prompts_arrive_with_the_traces_lengths_and_sharing(tmp_path: Path) -> None:
    """And every answer has the length it had."""
    async with _router(tmp_path) as (running, worker):
        sent = await run(Caller(Endpoint(url=running.url)), TRACE, Plan(speed=10.0))
        found = report(sent)
        prompts = sorted((call.prompt for call in worker.calls), key=len, reverse=True)
        assert [len(prompt) for prompt in prompts] == [40, 36, 20]
        assert prompts[0][:32] == prompts[1][:32]
        assert prompts[0][32:36] != prompts[1][32:36]
        assert [result.completion_tokens for result in sent.results] == [4, 6, 2]
        assert (found.requests, found.answered, found.failed, found.too_long) == (3, 3, {}, 0)
        assert found.hit_rate == round(48 / 96, 4)
        assert found.ideal_hit_rate == round(32 / 96, 4)
        assert 0 < found.ttft_p50_ms <= found.ttft_p99_ms
        assert found.tpot_p50_ms >= 0


async def test_smaller_blocks_make_everything_shorter(tmp_path: Path) -> None:
    """A small model can be asked what a large one was; what still doesn't fit is counted and not sent."""
    trace = _trace(RawRequest(0, 320, 40, tuple(range(20))), RawRequest(0, 3200, 40, tuple(range(200))))
    async with _router(tmp_path) as (running, worker):
        sent = await run(Caller(Endpoint(url=running.url)), trace, Plan(size=4))
        assert [(len(call.prompt), call.max_tokens) for call in worker.calls] == [(80, 10)]  # type: ignore[union-attr]
        assert (sent.too_long, len(sent.results), sent.size) == (1, 1, 4)
        with pytest.raises(ConfigError, match="make blocks smaller"):
            await run(Caller(Endpoint(url=running.url)), trace, Plan(size=160))


async def test_failures_are_counted_by_code(tmp_path: Path) -> None:
    """Before the first token and after it; figures are of the others only."""
    async with _router(tmp_path, Limits(max_failures=1)) as (running, worker):
        worker.faults.extend([Fault(kind="die"), Fault(kind="die", after=3)])
        found = report(await run(Caller(Endpoint(url=running.url)), TRACE, Plan(speed=1.0, max_open=1)))
        assert (found.answered, found.failed) == (1, {"service_unavailable": 2})


async def test_router_that_is_not_there_is_named() -> None:
    """One line for the user."""
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:9"):
        await run(Caller(Endpoint(url="http://127.0.0.1:9")), TRACE, Plan())


def test_report_of_nothing_answered_is_zeros() -> None:
    """Rather than an exception after an hour's run."""
    sent = Sent(sent=TRACE.requests[:1], results=(Result(prompt_tokens=40, error="timeout"),), too_long=2, size=16, took_s=1.0)
    found = report(sent)
    assert (found.answered, found.failed, found.ttft_mean_ms, found.hit_rate) == (0, {"timeout": 1}, 0.0, 0.0)


@pytest.mark.parametrize("options", [{"speed": 0.0}, {"speed": float("inf")}, {"size": 0}, {"max_open": 0}])
def test_plan_that_can_not_be_is_refused(options: dict[str, Any]) -> None:
    """Before anything is sent."""
    with pytest.raises(ConfigError):
        Plan(**options)


def _mooncake(path: Path, count: int = 30) -> Path:
    lines = ({"timestamp": 100 * n, "input_length": 2048, "output_length": 20, "hash_ids": [0, 1, 2 + n, 100 + n]} for n in range(count))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _replay(*arguments: str) -> CliResult:
    return CliRunner().invoke(cli, ["replay", *arguments])


def test_command_runs_a_trace_through_the_simulated_cluster(tmp_path: Path) -> None:
    """Several policies side by side, as a table and for programs."""
    path = _mooncake(tmp_path / "trace.jsonl")
    told = json.loads(_replay(str(path), "--against", "sim", "--policy", "random", "--policy", "ttft", "--json").output)
    assert told["trace"]["format"] == "mooncake"
    assert told["trace"]["shared"] == round(29 * 1024 / (30 * 2048), 4)
    assert set(told["policies"]) == {"random", "ttft"}
    assert told["policies"]["ttft"]["requests"] == 30
    assert told["policies"]["ttft"]["hit_rate"] > 0.3
    table = _replay(str(path), "--against", "sim").output
    assert "ttft_mean_s" in table
    assert "30 requests" in table


def test_command_simulates_a_trace_without_blocks(tmp_path: Path) -> None:
    """Nobody shares anything then."""
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,4808,10\n2023-11-16 18:17:04,4808,10\n")
    told = json.loads(_replay(str(path), "--against", "sim", "--json").output)
    assert told["policies"]["ttft"]["hit_rate"] == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--against", "sim", "--policy", "best"), "no routing policy is called 'best'"),
        (("--against", "sim", "--model", "m"), "--model is for --against live"),
        (("--against", "live", "--policy", "random"), "--policy is for --against sim"),
        (("--against", "sim", "--speed", "0"), "--speed must be above 0"),
    ],
)
def test_command_says_what_does_not_go_together(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    """One line and exit code 1."""
    result = _replay(str(_mooncake(tmp_path / "trace.jsonl")), *arguments)
    assert result.exit_code == 1
    assert words in " ".join(result.output.split())


async def test_command_replays_live_and_says_when_requests_failed(tmp_path: Path) -> None:
    """Exit code 0, then 3."""

    path = _mooncake(tmp_path / "trace.jsonl", 3)
    (tmp_path / "model").mkdir()
    async with _router(tmp_path / "model", Limits(max_failures=1)) as (running, worker):
        arguments = (str(path), "--against", "live", "--router", running.url, "--block-tokens", "8", "--speed", "50")
        result = await asyncio.to_thread(_replay, *arguments, "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.output)["answered"] == 3
        worker.faults.append(Fault(kind="die"))
        result = await asyncio.to_thread(_replay, *arguments)
        assert result.exit_code == 3
        assert "service_unavailable 1" in result.output


async def test_recorded_requests_can_be_replayed(tmp_path: Path) -> None:
    """`kvpool record` follows a router, and what it writes is a trace like any other."""

    (tmp_path / "model").mkdir()
    path = tmp_path / "recorded.jsonl"
    async with _router(tmp_path / "model") as (running, _):
        recording = asyncio.ensure_future(
            asyncio.to_thread(CliRunner().invoke, cli, ["record", "--router", running.url, "--out", str(path), "--count", "2"])
        )
        async with asyncio.timeout(30):
            while not path.exists() or not path.read_text():  # noqa: ASYNC110  another thread writes it
                await asyncio.sleep(0.01)
        await run(Caller(Endpoint(url=running.url)), _trace(*[RawRequest(0, 40, 4, ("a", "b", "c"))] * 2), Plan(max_open=1))
        result = await recording
        assert result.exit_code == 0, result.output
        assert "2 requests recorded" in result.stderr
        again = await asyncio.to_thread(CliRunner().invoke, cli, ["record", "--router", running.url, "--out", str(path)])
        assert again.exit_code == 1
    told = json.loads(_replay(str(path), "--against", "sim", "--json").output)
    assert (told["trace"]["format"], told["trace"]["requests"], told["trace"]["block_tokens"]) == ("kvpool", 2, 16)
    assert told["trace"]["shared"] == 0.5
