"""A stand-in for a stock vLLM server: its HTTP API and its KV events, over a prefix cache that only counts.

It is asked in token ids and answers in token ids, one chunk a token, as `/v1/completions` streams them. A test says what goes wrong.
"""

import asyncio
import contextlib
import socket
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from router.testing.vllm import CLEARED, StockEngine, names_of, removed, stored


class StockServer:
    """One server at a port that it keeps over restarts. `await start()`, `await stop()`.

    `answer` is (prompt, position in the answer) -> token. `tells_events`: whether it says where it publishes, `details`: whether it says
    at the end how much of the prompt it had (`--enable-prompt-tokens-details`). `kv_blocks`: what its cache holds.
    """

    def __init__(
        self,
        answer: Callable[[tuple[int, ...], int], int],
        *,
        model: str = "served",
        block_size: int = 16,
        kv_blocks: int = 4096,
        tells_events: bool = True,
        details: bool = True,
        adapters: tuple[str, ...] = (),
    ) -> None:
        self.answer = answer
        self.model = model
        self.block_size = block_size
        self.kv_blocks = kv_blocks
        self.tells_events = tells_events
        self.details = details
        self.adapters = adapters
        """LoRA adapters that it has; may be changed."""
        self.engine = StockEngine()
        self.port = 0
        self.started_s = 0.0
        self.bodies: list[dict[str, Any]] = []
        """What was asked, in order."""
        self.cached: list[int] = []
        """Tokens that each prompt found here."""
        self.gone = 0
        """Answers that nobody waited for."""
        self.lossy = False
        """Its events are lost on the way."""
        self.ill = 0
        """Status that it answers instead, 0: none."""
        self.delay_s = 0.0
        self.token_s = 1e-4
        """Seconds to compute a token of a prompt that isn't cached."""
        self.cut_after: int | None = None
        """The connection breaks after so many tokens of the next answer."""
        self._held: OrderedDict[int | bytes, None] = OrderedDict()
        self._running = 0
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where it is, as `--engine` takes it."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Serve from now on, where it did before."""
        await self.engine.start()
        self.started_s = time.time()
        app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/metrics", self._metrics),
                Route("/kv_event_sources", self._sources),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ]
        )
        bound = socket.create_server(("127.0.0.1", self.port), backlog=256)
        self.port = bound.getsockname()[1]
        self._server = _Quiet(uvicorn.Config(app, loop="none", http="httptools", ws="none", lifespan="off", log_config=None))
        self._task = asyncio.create_task(self._server.serve(sockets=[bound]))
        while not self._server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """As if the process had ended."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._task
        await self.engine.stop()

    async def restart(self) -> None:
        """Another life at the same addresses, with nothing in its cache."""
        await self.stop()
        self._held.clear()
        self.engine.begin_anew()
        await self.start()

    async def reset(self) -> None:
        """Its cache is cleared, as by `POST /reset_prefix_cache`."""
        self._held.clear()
        await self.engine.say(CLEARED, lost=self.lossy)

    async def fill(self, tokens: tuple[int, ...], salt: str = "", lora: str = "") -> int:
        """Put a prompt's blocks into the cache, as if it had been computed; how many of its tokens were there."""
        own = f"{lora}\0{salt}" if lora else salt
        names = names_of(tokens, self.block_size, salt=own)
        known = next((i for i, name in enumerate(names) if name not in self._held), len(names))
        for name in names:
            self._held[name] = None
            self._held.move_to_end(name)
        events: list[Any] = []
        if known < len(names):
            each = [[lora] if lora else []] * len(names)
            extra = [[*one, *([salt] if salt and i == 0 else [])] or None for i, one in enumerate(each)][known:]
            events.append(stored(tokens, self.block_size, first=known, salt=own, extra_keys=extra, lora_name=lora or None))
        while len(self._held) > self.kv_blocks:
            events.append(removed([self._held.popitem(last=False)[0]]))
        if events:
            await self.engine.say(*events, lost=self.lossy)
        return min(known * self.block_size, max(0, len(tokens) - 1))

    async def _health(self, request: Request) -> Response:
        return Response(status_code=self.ill or 200)

    async def _models(self, request: Request) -> Response:
        base = {"id": self.model, "object": "model", "parent": None, "max_model_len": 4096}
        adapters = [{"id": one, "object": "model", "root": f"/{one}", "parent": self.model, "max_model_len": None} for one in self.adapters]
        return JSONResponse({"object": "list", "data": [*adapters, base]})

    async def _metrics(self, request: Request) -> Response:
        lines = [
            f"process_start_time_seconds {self.started_s}",
            f'vllm:cache_config_info{{block_size="{self.block_size}",hash_block_size="7",num_gpu_blocks="{self.kv_blocks}"}} 1.0',
            f'vllm:num_requests_running{{engine="0",model_name="{self.model}"}} {float(self._running)}',
            f'vllm:num_requests_waiting{{engine="0",model_name="{self.model}"}} 0.0',
        ]
        return Response("\n".join(lines) + "\n", media_type="text/plain")

    async def _sources(self, request: Request) -> Response:
        if not self.tells_events:
            return JSONResponse({})
        events, replay = (f"tcp://*:{one.rpartition(':')[2]}" for one in (self.engine.endpoint, self.engine.replay_endpoint))
        return JSONResponse({"0": {"publisher": "zmq", "endpoint": events, "replay_endpoint": replay, "topic": ""}})

    async def _complete(self, request: Request) -> Response:
        body = msgspec.json.decode(await request.body())
        self.bodies.append(body)
        if body["model"] not in (self.model, *self.adapters):
            return JSONResponse({"error": {"message": "no such model"}}, status_code=404)
        if self.ill:
            return JSONResponse({"error": {"message": "the engine does not like this"}}, status_code=self.ill)
        return StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """One chunk a token, then one with usage."""
        prompt, cut, self.cut_after = tuple(body["prompt"]), self.cut_after, None
        self._running += 1
        over = False
        try:
            lora = body["model"] if body["model"] in self.adapters else ""
            cached = await self.fill(prompt, body.get("cache_salt", ""), lora)
            self.cached.append(cached)
            await asyncio.sleep(self.token_s * (len(prompt) - cached))
            for position in range(body["max_tokens"]):
                if position == cut:
                    raise ConnectionError("as told")
                await asyncio.sleep(self.delay_s)
                token = self.answer(prompt, position)
                stops = token in body["stop_token_ids"]
                reason = "stop" if stops else "length" if position == body["max_tokens"] - 1 else None
                choice = {"index": 0, "text": "", "token_ids": [token], "finish_reason": reason, "logprobs": likely(token, body)}
                yield event({"choices": [choice]})
                if stops:
                    break
            over = True
            details = {"prompt_tokens_details": {"cached_tokens": cached}} if self.details else {}
            yield event({"choices": [], "usage": {"prompt_tokens": len(prompt), **details}})
            yield b"data: [DONE]\n\n"
        finally:
            self._running -= 1
            self.gone += not over and cut is None


class _Quiet(uvicorn.Server):
    """Signals are not its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        """Capture nothing."""
        yield


def event(chunk: dict[str, Any]) -> bytes:
    """As server-sent events are spelled."""
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def likely(token: int, body: dict[str, Any]) -> dict[str, Any] | None:
    """Log-probabilities as vLLM spells them: -0.5 for the token, the tokens behind it half a step less each."""
    if body.get("logprobs") is None:
        return None
    top = {f"token_id:{token + step}": -0.5 - step / 2 for step in range(max(1, body["logprobs"]))}
    return {"tokens": [f"token_id:{token}"], "token_logprobs": [-0.5], "top_logprobs": [top]}
