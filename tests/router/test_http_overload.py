"""What callers and operators see when there are more requests than workers can take."""

import asyncio
from pathlib import Path

import httpx

from router.settings import Limits
from router.testing.cluster import ScriptedCluster
from router.testing.model import NAME, tiny_model
from router.testing.server import serving
from router.testing.workers import ScriptedWorker


async def test_full_line_is_a_429_with_retry_after_and_shows_in_the_metrics(tmp_path: Path) -> None:
    """One is served, one waits, the third is told when to come back; nobody else notices."""
    cluster, worker = ScriptedCluster(NAME), ScriptedWorker(lambda prompt, position: 70, delay_s=0.1)
    cluster.add("decode", worker)
    limits = Limits(decode_slots=1, max_queued=1)
    async with (
        serving(tiny_model(tmp_path), cluster, limits=limits) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as http,
    ):
        gate = running.services.dispatcher.entrance.gate

        def ask() -> "asyncio.Task[httpx.Response]":
            return asyncio.ensure_future(http.post("/v1/completions", json={"model": NAME, "prompt": "a key", "max_tokens": 4}))

        first = ask()
        async with asyncio.timeout(20):
            while worker.running == 0:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.005)
            second = ask()
            while sum(gate.lines.values()) == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        third = await ask()
        assert (third.status_code, third.headers["retry-after"]) == (429, "1")
        error = third.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "overloaded")
        assert "waiting for a worker" in error["message"]
        assert [(await answer).status_code for answer in (first, second)] == [200, 200]
        shown = (await http.get("/metrics")).text
    for line in (
        'kvpool_router_rejections_total{reason="queue_full"} 1.0',
        'kvpool_router_queue_length{kind="direct"} 0.0',
        'kvpool_router_requests_total{endpoint="completion",outcome="busy"} 1.0',
        'kvpool_router_choices_total{by="policy",policy="ttft",role="decode"} 2.0',
        "kvpool_router_skipped_prefills_total 0.0",
        "kvpool_router_queue_seconds_count 3.0",
    ):
        assert line in shown, line
    assert len(worker.calls) == 2
