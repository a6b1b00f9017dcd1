"""The router in front of two stock engines, fed by their ZMQ events only: how many repeats go to the engine that holds the prompt?

`python -m bench.stock_engines [--vllm PYTHON] [--prompts 20] [--tokens 400] [--lose 0.2] [--json]` starts two engines and a router in front
of them. `--vllm` is the interpreter of an environment with vLLM for CPUs; without it the engines are stand-ins that speak the same HTTP and
ZMQ. A part of all events (`--lose`) is lost between engines and router; replays are not.

1. `events`: each prompt is computed by an engine directly, in turns. Then it is asked of the router, which saw none of that.
2. `repeats`: new prompts, asked of the router twice: the second time it must go where the first went.
3. `reset`: the cache of the first engine is cleared; then prompts as in 2.
4. `restart`: the first engine ends and comes back at its address; requests go on meanwhile. Then prompts as in 2.

Keys: `events`, `repeats`, `reset`, `restart`: the part that went to the holder; `failed` requests; `cached_share`: of the tokens of prompts
that went to their holder, the part that the engines say they had; `lost` messages. Exit status 0 if each part is at least 0.9 and none
failed.
"""

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import click
import httpx
import zmq
import zmq.asyncio

from bench.report import print_json, print_table
from kvpool.cluster.child import Child
from kvpool.config.models import resolve_model
from kvpool.testing.stock_process import VllmServer, free_ports
from kvpool.units import SECOND
from router.stock.place import EnginePlace
from router.testing.stock import StockServer

GOOD = 0.9
_NAME = "stock"
_SETTLE_S = 7.0
"""Longer than the silence after which a feed asks for what it may have missed."""

Prompt = list[int]


class Engine(Protocol):
    """One engine at a fixed address."""

    @property
    def url(self) -> str:
        """Where it serves."""
        ...

    @property
    def events(self) -> str:
        """Where it publishes."""
        ...

    @property
    def replay(self) -> str:
        """Where it replays."""
        ...

    async def restart(self) -> None:
        """End, and come back."""
        ...


class Vllm:
    """A vLLM server for CPUs, one thread, as a child process."""

    def __init__(self, python: str, model: Path, number: int, logs: Path) -> None:
        events, replay = free_ports(2)
        self.events, self.replay = (f"tcp://127.0.0.1:{port}" for port in (events, replay))
        config = f'{{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:{events}","replay_endpoint":"tcp://*:{replay}"}}'
        self._server = VllmServer(python, model, logs / f"engine{number}.log", core=number, flags=["--kv-events-config", config])
        self.url = self._server.url
        self._began = False

    def begin(self) -> None:
        """Start the process."""
        self._server.begin()
        self._began = True

    async def start(self) -> None:
        """Until it serves."""
        if not self._began:
            self.begin()
        await asyncio.to_thread(self._server.wait_healthy)

    async def stop(self) -> None:
        """End the process."""
        self._began = False
        await asyncio.to_thread(self._server.stop)

    async def restart(self) -> None:
        """See `Engine`."""
        await self.stop()
        await self.start()


class StandIn(StockServer):
    """A stand-in that can be asked to clear its cache, as vLLM can in its development mode."""

    def __init__(self) -> None:
        super().__init__(lambda prompt, position: 40 + position, tells_events=False)
        self.events = self.replay = ""

    async def start(self) -> None:
        """Serve."""
        await super().start()
        self.events, self.replay = self.engine.endpoint, self.engine.replay_endpoint


class Relay:
    """Passes an engine's messages on, but for a part that it loses."""

    def __init__(self, events: str, lose: float, rng: random.Random) -> None:
        context = zmq.asyncio.Context.instance()
        self._from, self._to = context.socket(zmq.SUB), context.socket(zmq.PUB)
        self._from.setsockopt(zmq.SUBSCRIBE, b"")
        self._from.connect(events)
        self._to.bind("tcp://127.0.0.1:*")
        self.events = str(self._to.getsockopt_string(zmq.LAST_ENDPOINT))
        self._lose, self._rng = lose, rng
        self.lost = 0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            frames = await self._from.recv_multipart()
            if self._rng.random() < self._lose:
                self.lost += 1
            else:
                await self._to.send_multipart(frames)

    async def close(self) -> None:
        """Pass on no more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._from.close(linger=0)
        self._to.close(linger=0)


class Run:
    """One run: the prompts, the router, and what went where."""

    def __init__(self, engines: Sequence[Engine], router: httpx.AsyncClient, *, prompts: int, tokens: int, rng: random.Random) -> None:
        self._engines, self._router = engines, router
        self._ids = [EnginePlace.parse(engine.url).id for engine in engines]
        self._prompts, self._tokens, self._rng = prompts, tokens, rng
        self.failed = 0
        self._cached = self._could = 0

    def fresh(self) -> list[Prompt]:
        """Prompts that nobody has seen."""
        return [[self._rng.randrange(10, 300) for _ in range(self._tokens)] for _ in range(self._prompts)]

    async def ask(self, prompt: Prompt, holder: int | None = None) -> int | None:
        """Ask the router; which engine it was. `holder`: the one that has the prompt."""
        body = {"model": _NAME, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        try:
            answer = await self._router.post("/v1/completions", json=body)
        except httpx.HTTPError:
            answer = None
        if answer is None or answer.status_code != 200:
            self.failed += 1
            return None
        found = answer.json()
        where = self._ids.index(found["kvpool"]["decode_worker"])
        if where == holder:
            self._cached += found["usage"]["prompt_tokens_details"]["cached_tokens"]
            self._could += len(prompt)
        return where

    async def events(self) -> float:
        """What engines computed for others."""
        prompts = self.fresh()
        for number, prompt in enumerate(prompts):
            engine = self._engines[number % len(self._engines)]
            body = {"model": "served", "prompt": prompt, "max_tokens": 1, "stream": True, "stop_token_ids": [], "temperature": 0}
            async with httpx.AsyncClient(base_url=engine.url, timeout=120) as http:
                (await http.post("/v1/completions", json=body)).raise_for_status()
        await asyncio.sleep(_SETTLE_S)
        right = [await self.ask(prompt, n % len(self._engines)) == n % len(self._engines) for n, prompt in enumerate(prompts)]
        return sum(right) / len(right)

    async def repeats(self) -> float:
        """Where the first went the second must go."""
        prompts = self.fresh()
        first = [await self.ask(prompt) for prompt in prompts]
        right = [where is not None and await self.ask(prompt, where) == where for prompt, where in zip(prompts, first, strict=True)]
        return sum(right) / len(right)

    async def reset(self) -> float:
        """The first engine forgets all."""
        engine = self._engines[0]
        if isinstance(engine, StandIn):
            await engine.reset()
        else:
            async with httpx.AsyncClient(base_url=engine.url, timeout=60) as http:
                (await http.post("/reset_prefix_cache")).raise_for_status()
        return await self.repeats()

    async def restart(self) -> float:
        """The first engine ends and comes back; requests go on meanwhile."""
        coming = asyncio.ensure_future(self._engines[0].restart())
        while not coming.done():
            await self.ask(self.fresh()[0])
            await asyncio.sleep(0.2)
        await coming
        await asyncio.sleep(2)
        return await self.repeats()

    @property
    def cached_share(self) -> float:
        """Of the tokens of prompts that went to their holder."""
        return self._cached / self._could if self._could else 0.0


@asynccontextmanager
async def routing(engines: Sequence[Engine], relays: Sequence[Relay], model: Path, log: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A router process that knows both engines, and a client of it."""
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "router", "--port", str(port), "--model", str(model), "--served-model-name", _NAME]
    for engine, relay in zip(engines, relays, strict=True):
        argv += ["--engine", f"{engine.url},events={relay.events},replay={engine.replay}"]
    child = Child(argv, log_path=log)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=150) as http:
            async with asyncio.timeout(60):
                while not await _counts(http, len(engines)):  # noqa: ASYNC110  another process
                    await asyncio.sleep(0.1)
            yield http
    finally:
        await asyncio.to_thread(child.stop, 20.0)


async def _counts(http: httpx.AsyncClient, workers: int) -> bool:
    try:
        return bool((await http.get("/health")).json()["workers"]["decode"] == workers)
    except httpx.HTTPError:
        return False


async def measure(*, vllm: str | None, model: Path, prompts: int, tokens: int, lose: float, logs: Path, seed: int = 1) -> dict[str, Any]:
    """All four parts."""
    rng = random.Random(seed)
    engines: Sequence[Vllm | StandIn] = [Vllm(vllm, model, i, logs) if vllm else StandIn() for i in range(2)]
    async with AsyncExitStack() as stack:
        for engine in engines:
            stack.push_async_callback(engine.stop)
            if isinstance(engine, Vllm):
                engine.begin()
        for engine in engines:
            await engine.start()
        relays = [Relay(engine.events, lose, rng) for engine in engines]
        for relay in relays:
            stack.push_async_callback(relay.close)
        http = await stack.enter_async_context(routing(engines, relays, model, logs / "router.log"))
        run = Run(engines, http, prompts=prompts, tokens=tokens, rng=rng)
        found: dict[str, Any] = {name: round(await getattr(run, name)(), 3) for name in ("events", "repeats", "reset", "restart")}
        lost = sum(relay.lost for relay in relays)
        return {
            **found,
            "failed": run.failed,
            "cached_share": round(run.cached_share, 3),
            "lost": lost,
            "engines": "vllm" if vllm else "stand-ins",
        }


def good(found: dict[str, Any]) -> bool:
    """Whether repeats go to their holders, whatever happened before."""
    return not found["failed"] and all(found[name] >= GOOD for name in ("events", "repeats", "reset", "restart"))


@click.command()
@click.option("--vllm", default=None, help="Interpreter of an environment with vLLM for CPUs; stand-ins without it.")
@click.option("--model", default="smollm2", show_default=True, help="As the router's.")
@click.option("--prompts", default=20, show_default=True, type=click.IntRange(1))
@click.option("--tokens", default=400, show_default=True, type=click.IntRange(129), help="Of each prompt.")
@click.option("--lose", default=0.2, show_default=True, type=click.FloatRange(0, 0.9), help="Part of the events that is lost.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
def main(vllm: str | None, model: str, prompts: int, tokens: int, lose: float, as_json: bool) -> None:
    """Measure, print, compare."""
    directory = resolve_model(model, deadline_ns=time.monotonic_ns() + 600 * SECOND)
    with TemporaryDirectory() as logs:
        found = asyncio.run(measure(vllm=vllm, model=directory, prompts=prompts, tokens=tokens, lose=lose, logs=Path(logs)))
    print_table(("what", "figure"), [(name, str(value)) for name, value in found.items()])
    if as_json:
        print_json(found)
    sys.exit(0 if good(found) else 1)


if __name__ == "__main__":
    main()
