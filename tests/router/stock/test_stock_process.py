"""`python -m router --engine ...`: a process of its own in front of stand-ins, with no cluster at all."""

import asyncio
import sys
import time
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from kvpool.cluster.child import Child
from router.testing.model import NAME, write_tiny_model
from router.testing.stock import StockServer
from router.text.model import TextModel

STORED = 'kvpool_router_feed_events_total{what="stored"} 2.0'
"""In the router's metrics: it has heard of the two full blocks of the prompt, once."""


async def test_router_serves_over_engines_without_a_cluster(tmp_path: Path) -> None:
    """Flags in, an answer out, repeats at the holder, exit status 0.

    The engines don't say how much of a prompt they had, so nothing is learnt from how long this machine takes: what they hold alone
    decides, though the repeats take longer than the first request did.
    """
    (tmp_path / NAME).mkdir()
    model = TextModel.load(write_tiny_model(tmp_path / NAME), NAME)
    words = [*model.encode("the quick brown fox", rendered=False), *model.stop_tokens]
    engines = [StockServer(lambda prompt, position: words[position], details=False) for _ in range(2)]
    for engine in engines:
        await engine.start()
    named = [flag for engine in engines for flag in ("--engine", engine.url)]
    router = Child([sys.executable, "-m", "router", "--port", "0", "--model", str(tmp_path / NAME), *named], log_path=tmp_path / "log")
    try:
        url = await asyncio.to_thread(_url, tmp_path / "log")
        messages = [{"role": "user", "content": "the lazy dog jumps over a block " * 4}]
        async with httpx.AsyncClient(base_url=url) as http, AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

            async def ask() -> str | None:
                answer = await client.chat.completions.create(model=NAME, messages=messages)  # type: ignore[arg-type]
                return answer.choices[0].message.content

            async with asyncio.timeout(60):
                while (await http.get("/health")).json()["workers"]["decode"] != 2:  # noqa: ASYNC110  another process
                    await asyncio.sleep(0.05)
                answers = [await ask()]
                while STORED not in (await http.get("/metrics")).text:  # noqa: ASYNC110  another process
                    await asyncio.sleep(0.05)
            for engine in engines:
                engine.token_s = 0.01
            answers += [await ask() for _ in range(3)]
            assert answers == ["the quick brown fox"] * 4
            assert sorted(len(engine.bodies) for engine in engines) == [0, 4]
    finally:
        status = await asyncio.to_thread(router.stop, 20.0)
        for engine in engines:
            await engine.stop()
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log, log
    assert status == 0


def _url(log: Path) -> str:
    deadline = time.monotonic() + 60
    while "serving on " not in (text := log.read_text() if log.exists() else ""):
        assert time.monotonic() < deadline, text
        time.sleep(0.05)
    return text.split("serving on ")[1].split()[0]


@pytest.mark.parametrize(
    ("flags", "complaint"), [([], "--engine for each stock engine"), (["--engine", "nowhere"], "an engine's URL is http://host:port")]
)
async def test_wrong_flags_end_the_process_with_a_reason(tmp_path: Path, flags: list[str], complaint: str) -> None:
    """One line that says what to do."""
    root = Path(__file__).parents[3]
    done = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", "--model", ".", *flags, stderr=-1, cwd=tmp_path, env={"PYTHONPATH": str(root)}
    )
    _, words = await asyncio.wait_for(done.communicate(), 120)
    assert (done.returncode, complaint in words.decode()) == (1, True)
