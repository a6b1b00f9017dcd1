"""Recordings: requests as they end, hashed under a secret of the recording's own, readable by `kvpool replay`."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvpool.errors import ConfigError
from kvpool.replay.traces import read_trace
from kvpool.request import FinishReason, Sampling, Scope, TokenSources
from router.decisions.recorder import MAX_RECORDINGS, MAX_WAITING, Recorder, block_hashes
from router.job import Job, Trace
from router.testing.cluster import ScriptedCluster
from router.testing.model import NAME, tiny_model
from router.testing.server import Running, serving
from router.testing.workers import ScriptedWorker


def _job(prompt: tuple[int, ...], *, tenant: str = "acme", salt: bytes = b"", session: str = "") -> Job:
    scope = Scope(salt=salt, tenant=tenant)
    return Job(
        request_id="r", prompt=prompt, max_tokens=5, stop_tokens=(), sampling=Sampling(), deadline_ns=0, scope=scope, session=session
    )


def _trace(arrived_ns: int = 2_000_000) -> Trace:
    sources = TokenSources(pool=16, computed=24)
    return Trace(
        arrived_ns=arrived_ns, first_token_ns=3_000_000, total_ns=9_000_000, sources=sources, generated=[1, 2], reason=FinishReason.STOP
    )


async def _take(lines: AsyncIterator[str], count: int) -> list[dict[str, Any]]:
    return [json.loads(await anext(lines)) for _ in range(count)]


async def test_recording_holds_lengths_times_and_hashes_only() -> None:
    """Equal prefixes of one tenant are equal, those of two are not; labels mean nothing elsewhere."""
    recorder = Recorder()
    lines = recorder.lines("m", 1_000_000)
    head = json.loads(await anext(lines))
    assert (head["kvpool_trace"], head["block_tokens"], head["model"]) == (1, 16, "m")
    prompt = tuple(range(40))
    for job in (_job(prompt, session="s"), _job((*prompt[:32], 99)), _job(prompt, tenant="evil", salt=b"x", session="s")):
        recorder.ended(job, _trace(), "ok")
    first, second, other = await _take(lines, 3)
    assert (first["at_ms"], first["input"], first["output"], first["cached"]) == (1.0, 40, 2, 16)
    assert (first["ttft_ms"], first["total_ms"], first["outcome"]) == (3.0, 9.0, "ok")
    assert len(first["blocks"]) == 3
    assert first["blocks"][:2] == second["blocks"][:2]
    assert first["blocks"][2] != second["blocks"][2]
    assert not set(first["blocks"]) & set(other["blocks"])
    assert first["session"] not in ("s", other["session"])
    assert first["tenant"] not in ("acme", other["tenant"])
    assert "session" not in second
    await lines.aclose()


async def test_two_recordings_have_nothing_in_common() -> None:
    """Or whoever has both could join them."""
    recorder = Recorder()
    recordings = [recorder.lines("m", 0) for _ in range(2)]
    for lines in recordings:
        await anext(lines)
    recorder.ended(_job(tuple(range(16)), session="s"), _trace(), "ok")
    (one,), (other,) = [await _take(lines, 1) for lines in recordings]
    assert not {*one["blocks"], one["session"], one["tenant"]} & {*other["blocks"], other["session"], other["tenant"]}


async def test_recording_that_falls_behind_says_what_it_lost() -> None:
    """Memory is bounded; what began before the recording is not its own and not lost either."""
    recorder = Recorder()
    lines = recorder.lines("m", 1_000_000)
    await anext(lines)
    recorder.ended(_job((1,)), _trace(arrived_ns=500_000), "ok")
    for _ in range(MAX_WAITING + 5):
        recorder.ended(_job((1,)), _trace(), "ok")
    recorder.close()
    rest = [json.loads(line) async for line in lines]
    assert (len(rest), rest[-1]) == (MAX_WAITING + 1, {"lost": 5})


def test_hashes_chain() -> None:
    """A block's hash says everything before it too; the partial last one counts."""
    prompt = tuple(range(40))
    hashes = block_hashes(b"k", b"", prompt)
    assert len(hashes) == 3
    assert block_hashes(b"k", b"", (99, *prompt[1:]))[1] != hashes[1]
    assert block_hashes(b"k", b"", prompt[:32]) == hashes[:2]
    assert not set(block_hashes(b"l", b"", prompt)) & set(hashes)


@contextlib.asynccontextmanager
async def _router(tmp_path: Path) -> AsyncIterator[tuple[Running, httpx.AsyncClient]]:
    model = tiny_model(tmp_path)
    cluster = ScriptedCluster(model.name)
    cluster.add("decode", ScriptedWorker(lambda prompt, position: 70))
    async with serving(model, cluster) as running, httpx.AsyncClient(base_url=running.url, timeout=30) as http:
        yield running, http


async def test_recording_over_http_can_be_replayed(tmp_path: Path) -> None:
    """From the first line to the file that `kvpool replay` reads; it ends when the router stops."""
    path = tmp_path / "recorded.jsonl"
    async with contextlib.AsyncExitStack() as stack:
        running, http = await stack.enter_async_context(_router(tmp_path))
        response = await stack.enter_async_context(http.stream("GET", "/kvpool/record"))
        lines = response.aiter_lines()
        text = [await anext(lines)]
        for prompt in ([70] * 40, [70] * 32 + [71] * 8):
            body = {"model": NAME, "prompt": prompt, "max_tokens": 3}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            text.append(await anext(lines))
        running.services.recorder.close()
        assert [line async for line in lines] == []
    path.write_text("\n".join(text))
    trace = await asyncio.to_thread(read_trace, path)
    assert [(r.prompt_tokens, r.output_tokens, r.blocks) for r in trace.requests] == [(40, 3, (0, 1, 2)), (40, 3, (0, 1, 3))]


async def test_recording_into_a_file_ends_with_what_was_served(tmp_path: Path) -> None:
    """Everything is written before the router is gone; a file that is there already is never touched."""
    recorder, path = Recorder(), tmp_path / "recorded.jsonl"
    async with recorder.written(path, "m", 0), recorder.written(None, "m", 0):
        await asyncio.sleep(0)
        for _ in range(5):
            recorder.ended(_job((1, 2)), _trace(), "ok")
    assert len((await asyncio.to_thread(read_trace, path)).requests) == 5
    with pytest.raises(ConfigError, match="isn't there yet"):
        async with recorder.written(path, "m", 0):
            raise AssertionError("it must not begin")


async def test_number_of_recordings_is_bounded(tmp_path: Path) -> None:
    """Each costs hashing."""
    async with _router(tmp_path) as (running, http):
        held = [running.services.recorder.lines("m", 0) for _ in range(MAX_RECORDINGS)]
        for lines in held:
            await anext(lines)
        response = await http.get("/kvpool/record")
        assert (response.status_code, response.json()["error"]["code"]) == (429, "too_many_recordings")
        for lines in held:
            await lines.aclose()
        assert not running.services.recorder.full
