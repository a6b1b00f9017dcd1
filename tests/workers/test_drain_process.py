"""A worker process that is told to stop while a router streams from it."""

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx

from kvpool.cluster import Membership, open_membership
from kvpool.cluster.embedded import EmbeddedServer
from kvpool.wire.channel import SERVER_OPTIONS, bind
from kvpool.wire.worker_server import add_worker
from router.testing.model import NAME, tiny_model
from router.testing.server import serving
from router.testing.workers import ScriptedWorker
from tests.router.test_router_process import Handler
from tests.workers.test_techniques_end_to_end import Cluster
from tests.workers.test_worker_process import running

DRAIN_S = 60
TOKENS = 40
# The command line of a decode worker; after five passes of the model the next one waits, at most a minute, for the file HOLD to go.
HELD = """
import sys, time
from pathlib import Path
from decode_worker.__main__ import main
from kvpool.engine.model import Model

hold, run, passes = Path(sys.argv.pop(1)), Model.run, 0


def held(*args, **kwargs):
    global passes
    passes += hold.exists()
    end = time.monotonic() + 60
    while passes > 5 and hold.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return run(*args, **kwargs)


Model.run = held
main()
"""


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it, with patience for a busy machine."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  other processes
            await asyncio.sleep(0.02)


@asynccontextmanager
async def newcomer(membership: Membership) -> AsyncIterator[ScriptedWorker]:
    """Another decode worker of the cluster, that only says what it is told to."""
    script, server = ScriptedWorker(lambda prompt, position: 7), grpc.aio.server(options=SERVER_OPTIONS)
    add_worker(server, Handler(script))
    address = bind(server, "127.0.0.1:0")
    await server.start()
    info = {"model": NAME, "namespace": "ab" * 32, "block_tokens": "8", "max_tokens": "512"}
    registration = await asyncio.to_thread(membership.join, role="decode", address=address, info=info)
    try:
        yield script
    finally:
        await asyncio.to_thread(registration.close)
        await server.stop(grace=None)


async def test_worker_process_told_to_stop_ends_its_stream_gets_nothing_new_and_exits_0(tiny: Path, tmp_path: Path) -> None:
    """A request that comes meanwhile waits for another worker, though this one is the only one there is; nobody's answer is cut off."""
    hold = tmp_path / "hold"
    (tmp_path / "tokenizer").mkdir()
    body = {"model": NAME, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with EmbeddedServer.start(tmp_path) as server, open_membership(server.url) as membership:
        flags = ["--cluster", server.url, "--model", str(tiny), "--served-model-name", NAME, "--block-tokens", "8", "--drain", str(DRAIN_S)]
        with running([sys.executable, "-c", HELD, str(hold), *flags]) as worker:
            view: Any = Cluster(membership)
            async with (
                serving(tiny_model(tmp_path / "tokenizer"), view) as router,
                httpx.AsyncClient(base_url=router.url, timeout=90) as http,
            ):
                fleet = router.services.dispatcher.fleet
                await until(lambda: len(fleet.offered("decode")) == 1)
                (draining,) = fleet.alive("decode")
                hold.touch()
                old = asyncio.ensure_future(http.post("/v1/completions", json={**body, "prompt": [1, 2, 3], "stream": True}))
                await until(lambda: draining.decode_tokens > 3)
                told_s = time.monotonic()
                worker.process.send_signal(signal.SIGTERM)
                await until(lambda: not fleet.offered("decode"))
                new = asyncio.ensure_future(
                    http.post("/v1/completions", json={**body, "prompt": [4, 5, 6]}, headers={"x-request-id": "new"})
                )
                async with asyncio.timeout(60):
                    while "waited_for_decode_worker" not in (await http.get("/kvpool/explain/new")).text:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
                async with newcomer(membership) as other:
                    assert (await new).json()["kvpool"]["token_ids"] == [7] * TOKENS
                    assert not old.done()
                    assert draining in fleet.alive("decode")
                    hold.unlink()
                    chunks = (await old).text.split("\n\n")
                    assert len(other.calls) == 1
                await asyncio.to_thread(worker.process.wait, max(0.0, told_s + DRAIN_S - time.monotonic()))
                assert worker.stop() == 0  # it has ended: this reads the rest of what it said
                await until(lambda: not fleet.alive("decode"))
        last = json.loads(chunks[-3].removeprefix("data: "))["kvpool"]
        assert (len(last["token_ids"]), last["retries"], last["decode_worker"]) == (TOKENS, 0, draining.ref.id)
        said = "".join(worker.lines)
        assert said.count(": decode after ") == 1
        assert "Traceback" not in said
