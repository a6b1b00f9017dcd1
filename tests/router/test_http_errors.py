"""Every refusal has OpenAI's shape and the right status; what is asked about the server is answered."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.settings import Limits
from router.testing.cluster import ScriptedCluster
from router.testing.model import NAME, tiny_model
from router.testing.server import Running, serving
from router.testing.workers import Fault, ScriptedWorker
from router.text.model import TextModel

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """One tiny model for all tests here."""
    return tiny_model(tmp_path_factory.mktemp("model"))


class Stage:
    """A router with one decode worker, and a bare HTTP client."""

    def __init__(self, running: Running, http: httpx.AsyncClient, decode: ScriptedWorker, cluster: ScriptedCluster) -> None:
        self.running = running
        self.http = http
        self.decode = decode
        self.cluster = cluster

    async def chat(self, **fields: Any) -> httpx.Response:
        """One chat request."""
        return await self.http.post("/v1/chat/completions", json={"model": NAME, "messages": USER, "max_tokens": 4, **fields})


@contextlib.asynccontextmanager
async def stage(model: TextModel, limits: Limits | None = None, worker_tokens: int = 400) -> AsyncIterator[Stage]:
    """A router over one decode worker that says nothing but token 70."""
    cluster, decode = ScriptedCluster(model.name, max_tokens=worker_tokens), ScriptedWorker(lambda prompt, position: 70)
    cluster.add("decode", decode)
    async with serving(model, cluster, limits=limits) as running, httpx.AsyncClient(base_url=running.url, timeout=30) as http:
        yield Stage(running, http, decode, cluster)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of a response with `status`, checked for its shape."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert response.headers["x-request-id"]
    return error


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until `condition` holds; ten seconds at most."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  the condition is in plain objects
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"model": "\\ud800"}'])
async def test_malformed_json_is_a_400(model: TextModel, path: str, body: bytes) -> None:
    """Not a 500, not a hang."""
    async with stage(model) as s:
        assert error_of(await s.http.post(path, content=body), 400)["code"] == "invalid_json"


async def test_requests_that_can_not_be_served_reach_no_worker(model: TextModel) -> None:
    """Everything is checked before a worker hears of it."""
    async with stage(model) as s:
        assert error_of(await s.chat(model="gpt-5"), 404)["code"] == "model_not_found"
        assert error_of(await s.chat(messages=[]), 400)["param"] == "messages"
        assert error_of(await s.chat(max_tokens=-1), 400)["param"] == "max_tokens"
        assert error_of(await s.chat(temperature=9), 400)["param"] == "temperature"
        assert error_of(await s.chat(min_p=0.5), 400)["code"] == "unsupported_parameter"
        assert error_of(await s.chat(stream=True, stop=[""]), 400)["param"] == "stop[0]"
        assert s.decode.calls == []
        assert s.running.services.in_flight == 0


async def test_prompt_that_does_not_fit_is_a_400(model: TextModel) -> None:
    """By itself, with the answer asked for, and against the smallest worker's context (400) rather than the model's (512)."""
    async with stage(model) as s:
        error = error_of(await s.chat(messages=[{"role": "user", "content": "z" * 3000}]), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert "400" in error["message"]
        error = error_of(await s.http.post("/v1/completions", json={"model": NAME, "prompt": [70] * 390, "max_tokens": 11}), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        fits = await s.http.post("/v1/completions", json={"model": NAME, "prompt": [70] * 390, "max_tokens": 10})
        assert fits.status_code == 200
        assert fits.json()["usage"]["total_tokens"] == 400


async def test_long_text_is_tokenised_like_a_short_one(model: TextModel) -> None:
    """It goes through another thread, and must come out the same."""
    async with stage(model) as s:
        text = "a block 你好 " * 4000
        response = await s.http.post("/tokenize", json={"text": text})
        assert tuple(response.json()["tokens"]) == model.encode(text, rendered=False)


async def test_token_ids_outside_the_vocabulary_are_a_400(model: TextModel) -> None:
    """A worker would index its embedding with them."""
    async with stage(model) as s:
        for token in (model.vocabulary, 2**40):
            error = error_of(await s.http.post("/v1/completions", json={"model": NAME, "prompt": [5, token]}), 400)
            assert error["param"] == "prompt"


async def test_template_that_refuses_is_a_400(model: TextModel) -> None:
    """Its message is for the caller."""
    async with stage(model) as s:
        template, model._template = model._template, None
        try:
            assert "no chat template" in error_of(await s.chat(), 400)["message"]
        finally:
            model._template = template


async def test_large_body_is_a_413(model: TextModel) -> None:
    """Declared or not."""
    async with stage(model, Limits(max_body_bytes=1000)) as s:
        assert error_of(await s.chat(user="x" * 2000), 413)["code"] == "request_too_large"

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b" " * 100

        assert error_of(await s.http.post("/v1/completions", content=chunks()), 413)["code"] == "request_too_large"
        assert (await s.chat()).status_code == 200


async def test_slow_body_is_a_408(model: TextModel) -> None:
    """A caller that never finishes its request must not hold a place for ever."""
    async with stage(model, Limits(client_timeout_s=0.2)) as s:

        async def half() -> AsyncIterator[bytes]:
            yield b'{"model":'
            await until(lambda: s.running.services.in_flight == 1)
            await until(lambda: s.running.services.in_flight == 0)

        for path in ("/v1/completions", "/tokenize"):
            assert error_of(await s.http.post(path, content=half()), 408)["code"] == "request_timeout"


async def test_caller_that_stops_reading_is_given_up(tmp_path: Path) -> None:
    """It keeps the connection open and takes nothing: its worker is needed elsewhere."""
    async with stage(tiny_model(tmp_path, context_tokens=200_000), Limits(client_timeout_s=0.3), worker_tokens=200_000) as s:
        body = {"model": NAME, "messages": USER, "stream": True}
        async with s.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            await until(lambda: s.decode.cancelled == 1 and s.running.services.in_flight == 0)


async def test_too_many_requests_are_a_429(model: TextModel) -> None:
    """Refused at once, with the time to come back; those in flight are not disturbed."""
    async with stage(model, Limits(max_in_flight=2)) as s:
        s.decode.delay_s = 0.05
        held = [asyncio.ensure_future(s.chat()) for _ in range(2)]
        await until(lambda: s.decode.running == 2)
        refused = await s.chat()
        assert error_of(refused, 429)["type"] == "rate_limit_error"
        assert refused.headers["retry-after"] == "1"
        assert [response.status_code for response in await asyncio.gather(*held)] == [200, 200]
        assert (await s.chat()).status_code == 200


async def test_unknown_paths_and_methods_have_the_same_shape(model: TextModel) -> None:
    """A client with a wrong base URL should be able to read why."""
    async with stage(model) as s:
        assert error_of(await s.http.get("/v1/nothing"), 404)["code"] == "unknown_url"
        wrong = await s.http.get("/v1/chat/completions")
        assert error_of(wrong, 405)["code"] == "method_not_allowed"
        assert wrong.headers["allow"] == "POST"


async def test_fault_of_the_router_is_a_500_without_details(model: TextModel, caplog: pytest.LogCaptureFixture) -> None:
    """Details are for the log."""
    async with stage(model) as s:
        s.decode.answer = lambda prompt, position: 1 // 0
        error = error_of(await s.chat(), 500)
        assert (error["code"], "division" in error["message"]) == ("internal_error", False)
        assert "ZeroDivisionError" in caplog.text


async def test_request_id_is_echoed_or_made(model: TextModel) -> None:
    """The thread through everybody's logs; but a header can't be split with it."""
    async with stage(model) as s:
        body = json.dumps({"model": NAME, "messages": USER, "max_tokens": 1})
        given = await s.http.post("/v1/chat/completions", content=body, headers={"x-request-id": "mine-1"})
        assert given.headers["x-request-id"] == "mine-1"
        made = [(await s.chat()).headers["x-request-id"] for _ in range(2)]
        assert made[0] != made[1]
        odd = await s.http.post("/v1/chat/completions", content=body, headers={"x-request-id": "a b" * 100})
        assert odd.headers["x-request-id"].startswith("req-")
        streamed = await s.http.post("/v1/chat/completions", content=body[:-1] + ', "stream": true}', headers={"x-request-id": "mine-2"})
        assert streamed.headers["x-request-id"] == "mine-2"
        assert len({call.request_id for call in s.decode.calls}) == len(s.decode.calls)


async def test_stream_is_plain_server_sent_events(model: TextModel) -> None:
    """Every event is `data: ` and JSON, the end mark is the last; a broken stream has no end mark."""
    async with stage(model, Limits(max_failures=1)) as s:
        response = await s.chat(stream=True)
        assert response.headers["content-type"].startswith("text/event-stream")
        events = response.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert all(json.loads(event.removeprefix("data: "))["object"] == "chat.completion.chunk" for event in events[:-2])
        s.decode.faults.append(Fault(kind="die", after=3))
        broken = (await s.chat(stream=True)).text
        assert "[DONE]" not in broken
        assert json.loads(broken.rstrip().split("\n\n")[-1].removeprefix("data: "))["error"]["code"] == "service_unavailable"


async def test_health_follows_the_decode_workers(model: TextModel) -> None:
    """Without one nothing can be served."""
    async with stage(model) as s:
        healthy = await s.http.get("/health")
        assert (healthy.status_code, healthy.json()["workers"]) == (200, {"prefill": 0, "decode": 1})
        s.cluster.remove(s.cluster.members("decode")[0])
        await asyncio.sleep(0)
        ill = await s.http.get("/health")
        assert (ill.status_code, ill.json()["status"]) == (503, "unavailable")
        assert "no decode worker" in ill.json()["detail"]


async def test_metrics_count_what_happened(model: TextModel) -> None:
    """One request that went well and one that was refused."""
    async with stage(model) as s:
        await s.chat()
        await s.chat(min_p=0.5)
        await until(lambda: b'outcome="rejected"} 1.0' in s.running.services.metrics.render())
        text = (await s.http.get("/metrics")).text
        prompt = len(model.encode(model.render(USER), rendered=True))
        for line in (
            'kvpool_router_requests_total{endpoint="chat",outcome="ok"} 1.0',
            'kvpool_router_requests_total{endpoint="chat",outcome="rejected"} 1.0',
            f"kvpool_router_prompt_tokens_total {prompt}.0",
            "kvpool_router_cached_tokens_total 0.0",
            "kvpool_router_completion_tokens_total 4.0",
            'kvpool_router_fallbacks_total{reason="no_prefill_worker"} 1.0',
            "kvpool_router_time_to_first_token_seconds_count 1.0",
            "kvpool_router_inter_token_seconds_count 3.0",
            'kvpool_router_workers_alive{role="decode"} 1.0',
            "kvpool_router_in_flight 0.0",
        ):
            assert line in text


async def test_tokenize_gives_what_a_request_would_use(model: TextModel) -> None:
    """So that callers can count before they ask."""
    async with stage(model) as s:
        chat = (await s.http.post("/tokenize", json={"messages": USER})).json()
        await s.chat()
        assert tuple(chat["tokens"]) == s.decode.calls[0].prompt
        assert chat["count"] == len(chat["tokens"])
        assert error_of(await s.http.post("/tokenize", json={}), 400)["param"] == "text"
