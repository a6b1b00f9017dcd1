"""What the `openai` client may ask for beyond one plain answer: several, log-probabilities, echo, tools, deadlines, patience."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from kvpool.request import DecodeRequest
from router.job import Job, Trace
from router.settings import Limits
from router.testing.cluster import ScriptedCluster
from router.testing.model import NAME, tiny_model, write_tiny_model
from router.testing.server import Running, serving
from router.testing.workers import Fault, ScriptedWorker
from router.text.model import TextModel

USER: Any = [{"role": "user", "content": "hi"}]
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TOOL_TEMPLATE = (
    "{% if tools %}<tool_call> is the form of calls of "
    "{{ tools | map(attribute='function') | map(attribute='name') | join(',') }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.city }}{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """One tiny model for all tests here."""
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """One whose template takes tools."""
    directory = write_tiny_model(tmp_path_factory.mktemp("tools"))
    (directory / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return TextModel.load(directory, NAME)


class Stage:
    """A router over two scripted workers, and clients of both kinds."""

    def __init__(self, running: Running, client: AsyncOpenAI, http: httpx.AsyncClient, workers: list[ScriptedWorker]) -> None:
        self.running, self.client, self.http = running, client, http
        self.prefill, self.decode = workers

    async def chat(self, **options: Any) -> Any:
        """One chat answer or stream."""
        return await self.client.chat.completions.create(**{"model": NAME, "messages": USER, **options})

    async def complete(self, **options: Any) -> Any:
        """One completion or stream."""
        return await self.client.completions.create(**{"model": NAME, "prompt": "a block", **options})


@contextlib.asynccontextmanager
async def stage(model: TextModel, text: str, *, limits: Limits | None = None, **options: Any) -> AsyncIterator[Stage]:
    """A router over one prefill and one decode worker that say `text`."""
    tokens = [*model.encode(text, rendered=False), *model.stop_tokens]
    cluster = ScriptedCluster(model.name, max_tokens=model.context_tokens)
    workers = [ScriptedWorker(lambda prompt, position: tokens[position % len(tokens)], **options) for _ in range(2)]
    for role, worker in zip(("prefill", "decode"), workers, strict=True):
        cluster.add(role, worker)
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(serving(model, cluster, limits=limits))
        client = await stack.enter_async_context(AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=30))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=running.url, timeout=30))
        yield Stage(running, client, http, workers)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until `condition` holds; ten seconds at most."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  the condition is in plain objects
            await asyncio.sleep(0.005)


async def test_several_answers_come_from_one_request_with_seeds_of_their_own(model: TextModel) -> None:
    """The first has the seed that was given; the prompt is paid once, the answers each; the others begin after the first."""
    async with stage(model, "the lazy dog") as s:
        answer = await s.chat(n=3, seed=5)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert {choice.message.content for choice in answer.choices} == {"the lazy dog"}
        seeds = [call.sampling.seed for call in s.prefill.calls]
        assert (seeds[0], len(set(seeds))) == (5, 3)
        prompt, each = len(s.prefill.calls[0].prompt), len(model.encode("the lazy dog", rendered=False)) + 1
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt, 3 * each)
        assert [choice["retries"] for choice in answer.kvpool["choices"]] == [0, 0, 0]
        await until(lambda: s.running.services.in_flight == 0)


async def test_several_answers_stream_side_by_side(model: TextModel) -> None:
    """Each chunk says whose it is; each answer has a role, a text and a reason."""
    async with stage(model, "the lazy dog", delay_s=0.001) as s:
        chunks = [chunk async for chunk in await s.chat(n=2, stream=True, stream_options={"include_usage": True})]
        for index in range(2):
            own = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
            assert own[0].delta.role == "assistant"
            assert "".join(choice.delta.content or "" for choice in own) == "the lazy dog"
            assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["stop"]
        assert chunks[-1].usage.completion_tokens == 2 * (len(model.encode("the lazy dog", rendered=False)) + 1)


async def test_failure_of_one_answer_ends_all(model: TextModel) -> None:
    """There is one status; the workers of the others are let go."""
    async with stage(model, "the lazy dog " * 4, delay_s=0.002, limits=Limits(max_failures=1)) as s:
        s.decode.faults.append(Fault(kind="die", after=2))
        with pytest.raises(openai.InternalServerError):
            await s.chat(n=2, max_tokens=400)
        await until(lambda: s.decode.running == 0 and s.prefill.running == 0 and s.running.services.in_flight == 0)


async def test_several_prompts_are_answered_in_order(model: TextModel) -> None:
    """Text and tokens alike; every prompt is paid."""
    async with stage(model, "x") as s:
        s.prefill.answer = s.decode.answer = lambda prompt, position: prompt[-1]
        answer = await s.complete(prompt=[[70, 71], [80, 81]], max_tokens=2, n=2)
        assert [choice.text for choice in answer.choices] == [model.decode([t, t]) for t in (71, 71, 81, 81)]
        assert answer.usage.prompt_tokens == 4


async def test_places_are_taken_for_every_answer(model: TextModel) -> None:
    """One request for many answers must not pass where as many requests would not."""
    async with stage(model, "x", limits=Limits(max_in_flight=3)) as s:
        assert len((await s.chat(n=3)).choices) == 3
        with pytest.raises(openai.RateLimitError):
            await s.chat(n=4)
        await until(lambda: s.running.services.in_flight == 0)


async def test_chat_logprobs_name_every_token_of_the_text(model: TextModel) -> None:
    """Whole and in a stream: tokens, bytes and alternatives add up to the answer; the end token has no text and is not among them."""
    text = "the lazy 你好"
    async with stage(model, text) as s:
        whole = (await s.chat(logprobs=True, top_logprobs=2)).choices[0].logprobs.content
        assert b"".join(bytes(entry.bytes) for entry in whole).decode() == text
        assert [entry.logprob for entry in whole] == [-0.5] * len(model.encode(text, rendered=False))
        assert [[top.logprob for top in entry.top_logprobs] for entry in whole] == [[-0.5, -1.0]] * len(whole)
        chunks = [chunk async for chunk in await s.chat(stream=True, logprobs=True)]
        streamed = [entry for chunk in chunks if (told := chunk.choices[0].logprobs) for entry in told.content]
        assert [entry.token for entry in streamed] == [entry.token for entry in whole]
        assert all(entry.top_logprobs == [] for entry in streamed)
        assert (await s.chat()).choices[0].logprobs is None


async def test_completion_logprobs_say_where_each_token_begins(model: TextModel) -> None:
    """In the older spelling; the chosen token is among its alternatives."""
    async with stage(model, "the lazy dog") as s:
        told = (await s.complete(logprobs=1, max_tokens=3)).choices[0].logprobs
        assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == 3
        assert told.text_offset == [0, len(told.tokens[0]), len("".join(told.tokens[:2]))]
        assert [top[token] for token, top in zip(told.tokens, told.top_logprobs, strict=True)] == [-0.5] * 3
        assert (await s.complete(logprobs=0)).choices[0].logprobs.top_logprobs is None


async def test_logprobs_stop_where_the_text_does(model: TextModel) -> None:
    """A stop string takes the tokens away that make it."""
    async with stage(model, "the quick brown fox") as s:
        choice = (await s.chat(logprobs=True, stop=" brown")).choices[0]
        assert choice.message.content == "the quick"
        assert "".join(entry.token for entry in choice.logprobs.content) == "the quick"


async def test_echo_puts_the_prompt_before_the_answer(model: TextModel) -> None:
    """Text as it was sent, tokens decoded; whole and streamed."""
    async with stage(model, " is here") as s:
        assert (await s.complete(prompt="a key", echo=True)).choices[0].text == "a key is here"
        tokens = list(model.encode("a key", rendered=False))
        chunks = [chunk async for chunk in await s.complete(prompt=tokens, echo=True, stream=True)]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "a key is here"


async def test_stop_tokens_and_biases_reach_the_worker(model: TextModel) -> None:
    """And ids that the model doesn't have are refused by name."""
    async with stage(model, "a block of keys") as s:
        third = model.encode("a block of keys", rendered=False)[2]
        answer = await s.chat(logit_bias={"7": -100}, presence_penalty=0.5, extra_body={"stop_token_ids": [third]})
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 3)
        call = s.decode.calls[0]
        assert isinstance(call, DecodeRequest)
        assert third in call.stop_tokens
        assert (call.sampling.logit_bias, call.sampling.presence_penalty) == (((7, -100.0),), 0.5)
        for body, param in (({"stop_token_ids": [model.vocabulary]}, "stop_token_ids"), ({"logit_bias": {"999999": 1}}, "logit_bias")):
            with pytest.raises(openai.BadRequestError) as caught:
                await s.chat(extra_body=body)
            assert caught.value.param == param


async def test_tool_calls_are_read_out_of_the_answer(tool_model: TextModel) -> None:
    """The template shows the tools; whole and streamed answers carry calls with ids, and the reason says so."""
    said = 'I look. <tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    async with stage(tool_model, said) as s:
        choice = (await s.chat(tools=[WEATHER])).choices[0]
        assert "<tool_call> is the form of calls of weather" in tool_model.decode(s.prefill.calls[0].prompt)
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        call = choice.message.tool_calls[0]
        assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "weather", {"city": "Oslo"})
        assert call.id.startswith("call_")
        chunks = [chunk.choices[0] async for chunk in await s.chat(tools=[WEATHER], stream=True)]
        streamed = [call for choice in chunks for call in choice.delta.tool_calls or []]
        assert [(call.index, call.function.name, call.function.arguments) for call in streamed] == [(0, "weather", '{"city": "Oslo"}')]
        assert "".join(choice.delta.content or "" for choice in chunks) == "I look."
        assert chunks[-1].finish_reason == "tool_calls"
        plain = (await s.chat(tools=[WEATHER], tool_choice="none")).choices[0]
        assert (plain.message.content, plain.finish_reason) == (said, "stop")


async def test_turn_after_a_tool_call_is_rendered(tool_model: TextModel) -> None:
    """The model sees its own call and the result."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    turn = [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "rain"}]
    async with stage(tool_model, "bring a coat") as s:
        assert (await s.chat(messages=turn, tools=[WEATHER])).choices[0].message.content == "bring a coat"
        rendered = tool_model.decode(s.prefill.calls[0].prompt)
        assert "weatherOslo" in rendered
        assert "tool\nrain" in rendered


async def test_only_one_call_is_given_when_only_one_is_wanted(tool_model: TextModel) -> None:
    """And the worker is told to stop."""
    said = '<tool_call>{"name": "a"}</tool_call>' * 4
    async with stage(tool_model, said, delay_s=0.001) as s:
        message = (await s.chat(tools=[WEATHER], parallel_tool_calls=False)).choices[0].message
        assert [call.function.name for call in message.tool_calls] == ["a"]
        assert message.content is None
        await until(lambda: s.decode.cancelled == 1)


async def test_tools_are_refused_when_the_template_takes_none(model: TextModel) -> None:
    """Leaving them out silently would be another question."""
    async with stage(model, "x") as s:
        for options in ({"tools": [WEATHER]}, {"messages": [*USER, {"role": "tool", "tool_call_id": "c", "content": "5"}]}):
            with pytest.raises(openai.BadRequestError, match="takes no tools") as caught:
                await s.chat(**options)
            assert caught.value.code == "unsupported_parameter"
        assert s.prefill.calls == []


@pytest.mark.parametrize("way", ["header", "body"])
async def test_caller_may_shorten_its_deadline(model: TextModel, way: str) -> None:
    """By a header, which a gateway can add, or in the body; the router's own limit stays the longest."""
    async with stage(model, "a block " * 50, delay_s=0.05) as s:
        options: Any = {"extra_headers": {"x-request-timeout": "0.3"}} if way == "header" else {"extra_body": {"timeout": 0.3}}
        with pytest.raises(openai.InternalServerError) as caught:
            await s.chat(**options)
        assert caught.value.code == "timeout"


@pytest.mark.parametrize("given", ["soon", "-1", "nan", "inf"])
async def test_deadline_that_is_no_time_is_refused(model: TextModel, given: str) -> None:
    """Rather than taken for none."""
    async with stage(model, "x") as s:
        with pytest.raises(openai.BadRequestError) as caught:
            await s.chat(extra_headers={"x-request-timeout": given})
        assert caught.value.param == "x-request-timeout"


async def test_stream_that_waits_is_kept_alive_with_comments(model: TextModel) -> None:
    """Clients skip them; without one the first failure still has its status, after one it is an event."""
    body = {"model": NAME, "messages": USER, "stream": True, "max_tokens": 3}
    async with stage(model, "the lazy dog", delay_s=0.2, limits=Limits(keepalive_s=0.02, max_failures=1)) as s:
        text = (await s.http.post("/v1/chat/completions", json=body)).text
        events = text.split("\n\n")
        assert events[0] == ": keep-alive"
        assert events.index("data: [DONE]") == len(events) - 2
        assert ": keep-alive" not in events[next(at for at, event in enumerate(events) if event.startswith("data")) :]
        chunks = [chunk async for chunk in await s.chat(stream=True, max_tokens=3)]
        assert chunks[-1].choices[0].finish_reason == "length"
        s.prefill.faults.append(Fault(kind="die"))
        failed = await s.http.post("/v1/chat/completions", json=body)
        assert failed.status_code == 200
        assert '"code":"service_unavailable"' in failed.text
        assert "[DONE]" not in failed.text


async def test_connection_serves_one_request_after_another(model: TextModel) -> None:
    """Streams and errors alike leave it open."""
    async with stage(model, "the lazy dog") as s:
        opened: list[str] = []

        async def trace(name: str, info: Any) -> None:
            opened.extend([name] if name == "connection.connect_tcp.complete" else [])

        for body in ({"stream": True}, {"n": 0}, {}, {"stream": True}):
            request = s.http.build_request("POST", "/v1/chat/completions", json={"model": NAME, "messages": USER, **body})
            request.extensions["trace"] = trace
            await s.http.send(request)
        assert len(opened) == 1


async def test_what_the_caller_says_of_itself_reaches_the_dispatcher(model: TextModel) -> None:
    """For fairness, affinity and order."""
    async with stage(model, "x") as s:
        seen: list[Job] = []
        generate = s.running.services.dispatcher.generate

        def watched(job: Job, trace: Trace) -> AsyncGenerator[int, None]:
            seen.append(job)
            return generate(job, trace)

        s.running.services.dispatcher.generate = watched  # type: ignore[method-assign]
        await s.chat(user="u", extra_body={"priority": -2}, extra_headers={"x-session-id": "s1"})
        await s.chat(prompt_cache_key="s2")
        assert [(job.user, job.session, job.priority) for job in seen] == [("u", "s1", -2), ("", "s2", 0)]
