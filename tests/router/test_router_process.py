"""The router as a process of its own, over real membership and real gRPC; only the model is made up."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from openai import AsyncOpenAI

from kvpool.cluster import Membership, Registration, open_membership
from kvpool.cluster.child import Child
from kvpool.cluster.embedded import EmbeddedServer
from kvpool.request import DecodeEvent, DecodeRequest, PrefillEvent, PrefillRequest, WorkerStatus
from kvpool.wire.channel import SERVER_OPTIONS, bind
from kvpool.wire.worker_server import add_worker
from router.testing.model import NAME, tiny_model, write_tiny_model
from router.testing.workers import Fault, ScriptedWorker
from router.text.model import TextModel

USER: Any = [{"role": "user", "content": "hi"}]
TEXT = "the quick brown fox jumps over the lazy dog"


class Handler:
    """A scripted worker behind a real server."""

    def __init__(self, script: ScriptedWorker) -> None:
        self._script = script

    def prefill(self, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        """See `WorkerHandler`."""
        return self._script.prefill(request, 60)

    def decode(self, request: DecodeRequest) -> AsyncIterator[DecodeEvent]:
        """See `WorkerHandler`."""
        return self._script.decode(request, 60)

    async def status(self) -> WorkerStatus:
        """See `WorkerHandler`."""
        return await self._script.status(60)


class Worker:
    """A scripted worker that has joined the cluster."""

    def __init__(self, script: ScriptedWorker, server: grpc.aio.Server, registration: Registration) -> None:
        self.script = script
        self.server = server
        self.registration = registration

    async def die(self) -> None:
        """End all calls and the lease as a killed process would."""
        self.registration.abandon()
        await self.server.stop(grace=None)


class Bench:
    """A membership server, a router process and what is needed to fill the cluster."""

    def __init__(self, membership: Membership, router: Child, url: str, model: TextModel) -> None:
        self.membership = membership
        self.router = router
        self.url = url
        self.model = model
        self.servers: list[grpc.aio.Server] = []

    async def worker(self, role: str, *faults: Fault, delay_s: float = 0.0, forever: bool = False) -> Worker:
        """Start and join a worker that says `TEXT`."""
        tokens = [*self.model.encode(TEXT, rendered=False), *([] if forever else self.model.stop_tokens)]
        script = ScriptedWorker(lambda prompt, position: tokens[position % len(tokens)], delay_s=delay_s)
        script.faults.extend(faults)
        server = grpc.aio.server(options=SERVER_OPTIONS)
        add_worker(server, Handler(script))
        address = bind(server, "127.0.0.1:0")
        await server.start()
        self.servers.append(server)
        info = {"model": NAME, "namespace": "ab" * 32, "block_tokens": "4", "max_tokens": "512"}
        registration = await asyncio.to_thread(self.membership.join, role=role, address=address, info=info)
        return Worker(script, server, registration)

    @contextlib.asynccontextmanager
    async def clients(self) -> AsyncIterator[tuple[AsyncOpenAI, httpx.AsyncClient]]:
        """An `openai` client and a bare one; workers end with the block."""
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60))
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=self.url, timeout=60))
            try:
                yield client, http
            finally:
                await asyncio.gather(*(server.stop(grace=None) for server in self.servers))

    async def healthy(self, http: httpx.AsyncClient, **workers: int) -> None:
        """Wait until the router counts so many workers."""
        expected = {"prefill": 0, "decode": 0, **workers}
        async with asyncio.timeout(30):
            while (await http.get("/health")).json()["workers"] != expected:  # noqa: ASYNC110  another process
                await asyncio.sleep(0.05)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A router that has joined an otherwise empty cluster; it must end well."""
    (tmp_path / NAME).mkdir()
    write_tiny_model(tmp_path / NAME)
    with contextlib.ExitStack() as stack:
        server = EmbeddedServer.start(tmp_path, lease_ms=1000)
        stack.callback(server.close)
        membership = stack.enter_context(open_membership(server.url))
        argv = [sys.executable, "-m", "router", "--cluster", server.url, "--port", "0", "--model", str(tmp_path / NAME)]
        router = Child([*argv, "--stall-timeout", "5", "--direct-tokens", "0"], log_path=tmp_path / "router.log")
        stack.callback(lambda: router.stop(20.0))
        members = membership.wait(_has_router, _soon())
        url = next(member.info["url"] for member in members if member.role == "router")
        yield Bench(membership, router, url, tiny_model(tmp_path / NAME))
        log = (tmp_path / "router.log").read_text()
        assert "Traceback" not in log, log


def _has_router(members: tuple[Any, ...]) -> bool:
    return any(member.role == "router" for member in members)


def _soon() -> int:
    """A monotonic deadline generous enough for a busy machine."""
    return time.monotonic_ns() + 60_000_000_000


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  the condition is in plain objects
            await asyncio.sleep(0.02)


def _text(chunks: list[Any]) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def test_process_serves_over_grpc_and_ends_cleanly_on_sigterm(bench: Bench) -> None:
    """Everything real but the model: health, an answer whole and streamed, leaving, exit status 0."""
    async with bench.clients() as (client, http):
        assert (await http.get("/health")).status_code == 503
        prefill, decode = await bench.worker("prefill"), await bench.worker("decode")
        await bench.healthy(http, prefill=1, decode=1)
        whole = await client.chat.completions.create(model=NAME, messages=USER)
        assert whole.choices[0].message.content == TEXT
        stream = await client.chat.completions.create(model=NAME, messages=USER, stream=True)
        assert _text([chunk async for chunk in stream]) == TEXT
        assert (len(prefill.script.calls), len(decode.script.calls)) == (2, 2)
        await _until(lambda: prefill.script.running == decode.script.running == 0)
        assert (prefill.script.cancelled, decode.script.cancelled) == (0, 0)
        bench.router.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(bench.router.wait, 30.0) == 0
        await _until(lambda: bench.membership.members("router") == ())


async def test_worker_killed_midway_leaves_no_trace_in_the_answer(bench: Bench) -> None:
    """Its calls break off over real connections; another worker, which joins only later, goes on."""
    async with bench.clients() as (client, http):
        dying = await bench.worker("decode", delay_s=0.02)
        await bench.healthy(http, decode=1)
        stream = await client.chat.completions.create(model=NAME, messages=USER, stream=True)
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == 5:
                await dying.die()
                await bench.worker("decode")
        assert _text(chunks) == TEXT
        assert chunks[-1].kvpool["retries"] == 1  # type: ignore[attr-defined]
        await bench.healthy(http, decode=1)


async def test_silent_worker_that_lost_its_lease_is_left_for_another(bench: Bench) -> None:
    """As a stopped process: connection open, no word, no heartbeat, no status."""
    async with bench.clients() as (client, http):
        stopped = await bench.worker("decode", Fault(kind="hang", after=3))
        stopped.script.answers_status = False
        await bench.healthy(http, decode=1)
        task = asyncio.ensure_future(client.chat.completions.create(model=NAME, messages=USER))
        await _until(lambda: stopped.script.running == 1)
        stopped.registration.abandon()
        await bench.worker("decode")
        assert (await task).choices[0].message.content == TEXT
        await _until(lambda: stopped.script.running == 0)


async def test_hang_up_reaches_the_worker_over_grpc(bench: Bench) -> None:
    """Work for nobody must stop, two processes away."""
    async with bench.clients() as (client, http):
        decode = await bench.worker("decode", delay_s=0.02, forever=True)
        await bench.healthy(http, decode=1)
        stream = await client.chat.completions.create(model=NAME, messages=USER, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await _until(lambda: decode.script.running == 0)
        assert decode.script.cancelled == 1


async def test_stream_in_flight_is_finished_before_the_process_ends(bench: Bench) -> None:
    """A rolling update must not cut answers off."""
    async with bench.clients() as (client, http):
        await bench.worker("decode", delay_s=0.02)
        await bench.healthy(http, decode=1)
        stream = await client.chat.completions.create(model=NAME, messages=USER, stream=True)
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == 3:
                bench.router.send_signal(signal.SIGTERM)
        assert _text(chunks) == TEXT
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert await asyncio.to_thread(bench.router.wait, 30.0) == 0


def test_router_process_loads_no_torch() -> None:
    """It runs where no torch is installed, and starts in a second."""
    code = "import sys, router.main, router.assemble; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--model", "no-such-model"], "no-such-model"),
        (["--model", ".", "--request-timeout", "0"], "request_timeout_s must be positive"),
        (["--model", ".", "--max-body", "lots"], "not a size"),
        (["--model", "."], "no config.json"),
    ],
)
def test_wrong_flags_end_the_process_with_a_reason(tmp_path: Path, flags: list[str], complaint: str) -> None:
    """One line that says what to do, not a traceback."""
    argv = [sys.executable, "-m", "router", "--cluster", "memory://x", *flags]
    root = Path(__file__).parents[2]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path, env={"PYTHONPATH": str(root)})
    assert done.returncode == 1
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
