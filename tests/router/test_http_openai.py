"""The official `openai` client against a router on a real socket."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from router.settings import Limits
from router.testing.cluster import ScriptedCluster
from router.testing.model import NAME, tiny_model
from router.testing.server import Running, serving
from router.testing.workers import Fault, ScriptedWorker
from router.text.model import TextModel

USER: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """One tiny model for all tests here."""
    return tiny_model(tmp_path_factory.mktemp("model"))


class Stage:
    """A router, its scripted workers and an `openai` client."""

    def __init__(
        self, running: Running, client: AsyncOpenAI, prefill: ScriptedWorker, decode: ScriptedWorker, cluster: ScriptedCluster
    ) -> None:
        self.running = running
        self.client = client
        self.prefill = prefill
        self.decode = decode
        self.cluster = cluster

    async def chat(self, **options: Any) -> Any:
        """One chat answer or stream."""
        return await self.client.chat.completions.create(**{"model": NAME, "messages": USER, **options})

    async def streamed(self, **options: Any) -> list[Any]:
        """All chunks of a streamed chat answer."""
        return [chunk async for chunk in await self.chat(stream=True, **options)]


def says(model: TextModel, text: str, *, forever: bool = False) -> Callable[[tuple[int, ...], int], int]:
    """An answer function: `text`, then the stop token (or the text again, for ever)."""
    tokens = [*model.encode(text, rendered=False), *([] if forever else model.stop_tokens)]
    return lambda prompt, position: tokens[position % len(tokens)]


@contextlib.asynccontextmanager
async def stage(
    model: TextModel, text: str, *, forever: bool = False, limits: Limits | None = None, **options: Any
) -> AsyncIterator[Stage]:
    """A router over one prefill and one decode worker that say `text`."""
    cluster = ScriptedCluster(model.name, max_tokens=model.context_tokens)
    prefill, decode = (ScriptedWorker(says(model, text, forever=forever), **options) for _ in range(2))
    cluster.add("prefill", prefill)
    cluster.add("decode", decode)
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(serving(model, cluster, limits=limits))
        client = await stack.enter_async_context(AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=30))
        yield Stage(running, client, prefill, decode, cluster)


def content(chunks: list[Any]) -> str:
    """The text of a streamed chat answer."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until `condition` holds; ten seconds at most."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  the condition is in plain objects
            await asyncio.sleep(0.005)


async def test_chat_answer_is_whole_and_accounted_for(model: TextModel) -> None:
    """Text, finish reason, usage and where it came from."""
    async with stage(model, "the lazy dog", cached=8) as s:
        answer = await s.chat(seed=1, temperature=0)
        prompt = model.encode(model.render(USER), rendered=True)
        generated = len(model.encode("the lazy dog", rendered=False)) + 1
        assert answer.choices[0].message.content == "the lazy dog"
        assert answer.choices[0].finish_reason == "stop"
        assert (answer.object, answer.model, answer.id[:9]) == ("chat.completion", NAME, "chatcmpl-")
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), generated)
        assert usage.total_tokens == len(prompt) + generated
        assert usage.prompt_tokens_details.cached_tokens == 8
        assert s.prefill.calls[0].prompt == prompt
        extension = answer.kvpool
        assert extension["sources"] == {"resident": 0, "pool": 8, "computed": len(prompt) - 8}
        assert extension["decode_sources"]["pool"] == 8
        assert extension["retries"] == 0
        assert {"tokenize", "route", "queue", "load", "compute", "sample", "first_token", "total"} <= extension["times_ms"].keys()
        assert extension["prefill_worker"] == s.cluster.members("prefill")[0].id
        assert extension["decode_worker"] == s.cluster.members("decode")[0].id


async def test_chat_stream_says_the_same_in_pieces(model: TextModel) -> None:
    """First the role, then text, then the reason, usage last."""
    async with stage(model, "the lazy dog", cached=8) as s:
        chunks = await s.streamed(stream_options={"include_usage": True})
        assert chunks[0].choices[0].delta.role == "assistant"
        assert content(chunks) == "the lazy dog"
        assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) > 1
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert chunks[-1].choices == []
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 8
        assert chunks[-1].kvpool["retries"] == 0
        assert len({chunk.id for chunk in chunks}) == 1
        plain = await s.streamed()
        assert plain[-1].choices[0].finish_reason == "stop"
        assert plain[-1].kvpool["sources"]["pool"] == 8


async def test_completion_takes_text_and_tokens(model: TextModel) -> None:
    """The older endpoint, both ways of giving the prompt, streamed and not."""
    async with stage(model, " fox jumps", forever=True) as s:
        tokens = model.encode("the quick brown", rendered=False)
        for prompt in ("the quick brown", list(tokens)):
            answer = await s.client.completions.create(model=NAME, prompt=prompt, max_tokens=len(tokens))
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage is not None
            assert answer.usage.completion_tokens == len(tokens)
            stream = await s.client.completions.create(model=NAME, prompt=prompt, max_tokens=len(tokens), stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == answer.choices[0].text
        assert {call.prompt for call in s.prefill.calls} == {tokens}


@pytest.mark.parametrize("text", ["naïve 你好，世界", "🎉 and 👩‍👩‍👧‍👦!", "日本語"])
async def test_characters_over_several_tokens_arrive_whole(model: TextModel, text: str) -> None:
    """The tiny tokenizer spells these in single bytes; no chunk may carry half a character."""
    async with stage(model, text) as s:
        chunks = await s.streamed()
        assert content(chunks) == text
        assert all("\ufffd" not in (chunk.choices[0].delta.content or "") for chunk in chunks)


@pytest.mark.parametrize("stop", ["brown fox", "wn f", "n", ["zzz", " fox"], "dog"])
async def test_stop_string_ends_the_answer_and_the_work(model: TextModel, stop: str | list[str]) -> None:
    """Cut before it, wherever tokens end; and the decode worker is told to stop."""
    text = "the quick brown fox jumps over the lazy dog "
    first = min(text.find(one) for one in ([stop] if isinstance(stop, str) else stop) if one in text)
    async with stage(model, text, forever=True, delay_s=0.001) as s:
        answer = await s.chat(stop=stop)
        chunks = await s.streamed(stop=stop)
        assert answer.choices[0].message.content == text[:first] == content(chunks)
        assert answer.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens < len(model.encode(text, rendered=False)) + 1
        await until(lambda: s.decode.running == 0)
        assert s.decode.cancelled == len(s.decode.calls)


async def test_text_that_only_begins_a_stop_string_is_not_lost(model: TextModel) -> None:
    """What was held back comes out at the end."""
    async with stage(model, "the lazy d") as s:
        assert (await s.chat(stop="dog")).choices[0].message.content == "the lazy d"
        assert content(await s.streamed(stop="dog")) == "the lazy d"


async def test_max_tokens_ends_the_answer_for_length(model: TextModel) -> None:
    """And by default a chat answer may fill the context."""
    async with stage(model, "a block ", forever=True) as s:
        short = await s.chat(max_tokens=3)
        assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 3)
        full = await s.chat()
        assert full.usage.total_tokens == model.context_tokens


async def test_ignore_eos_goes_on_past_the_stop_token(model: TextModel) -> None:
    """Benchmarks need answers of a given length."""
    async with stage(model, "a block") as s:
        answer = await s.chat(max_tokens=20, extra_body={"ignore_eos": True})
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 20)


async def test_token_ids_are_returned_on_request(model: TextModel) -> None:
    """Proofs of equality compare tokens, not text; the stop token is one of them."""
    async with stage(model, "a block") as s:
        expected = [*model.encode("a block", rendered=False), *model.stop_tokens]
        body = {"return_token_ids": True}
        assert (await s.chat(extra_body=body)).kvpool["token_ids"] == expected
        assert (await s.streamed(extra_body=body))[-1].kvpool["token_ids"] == expected
        assert "token_ids" not in (await s.chat()).kvpool


async def test_absent_seed_is_drawn_once_per_request(model: TextModel) -> None:
    """A retry must draw the same tokens, another request must not."""
    async with stage(model, "a block") as s:
        await s.chat()
        await s.chat()
        await s.chat(seed=-5)
        seeds = [call.sampling.seed for call in s.prefill.calls]
        assert [call.sampling.seed for call in s.decode.calls] == seeds
        assert len(set(seeds)) == 3
        assert seeds[2] == 2**64 - 5


async def test_thirty_two_requests_at_once_each_get_their_own_answer(model: TextModel) -> None:
    """No crossed wires, and the books are level afterwards."""
    async with stage(model, "unused", delay_s=0.001) as s:
        end = model.stop_tokens[0]
        for worker in (s.prefill, s.decode):
            worker.answer = lambda prompt, position: prompt[position + 4] if position < 12 else end
        asked = [f"{number:02d} a block is a pure function of its key" for number in range(32)]

        async def one(text: str, streamed: bool) -> str:
            messages = [{"role": "user", "content": text}]
            if streamed:
                return content(await s.streamed(messages=messages))
            return str((await s.chat(messages=messages)).choices[0].message.content)

        answers = await asyncio.gather(*(one(text, number % 2 == 0) for number, text in enumerate(asked)))
        for text, answer in zip(asked, answers, strict=True):
            prompt = model.encode(model.render([{"role": "user", "content": text}]), rendered=True)
            assert answer == model.decode(prompt[4:16])
        fleet = s.running.services.dispatcher.fleet
        await until(lambda: s.running.services.in_flight == 0)
        assert all((w.active, w.backlog_tokens) == (0, 0) for role in ("prefill", "decode") for w in fleet.alive(role))


@pytest.mark.parametrize("streamed", [True, False])
async def test_caller_that_hangs_up_stops_the_worker(model: TextModel, streamed: bool) -> None:
    """Nobody is left to read it: the call is cancelled at once."""
    async with stage(model, "a block ", forever=True, delay_s=0.002) as s:
        if streamed:
            stream = await s.chat(stream=True)
            async for _ in stream:
                if s.decode.running:
                    break
            await stream.close()
        else:
            task = asyncio.ensure_future(s.chat())
            await until(lambda: s.decode.running == 1)
            task.cancel()
            await asyncio.wait({task})
        await until(lambda: s.decode.running == 0 and s.running.services.in_flight == 0)
        assert s.decode.cancelled == 1
        assert s.decode.calls[0].max_tokens > 100  # type: ignore[union-attr]
        counted = b'kvpool_router_requests_total{endpoint="chat",outcome="hung_up"} 1.0'
        await until(lambda: counted in s.running.services.metrics.render())


@pytest.mark.parametrize("after", [0, 3])
async def test_worker_death_is_invisible_but_counted(model: TextModel, after: int) -> None:
    """The answer is the same; the extension and the metrics tell."""
    async with stage(model, "the quick brown fox") as s:
        s.decode.faults.append(Fault(kind="die", after=after))
        s.cluster.add("decode", ScriptedWorker(says(model, "the quick brown fox")), id="f" * 32)
        await asyncio.sleep(0)
        s.running.services.dispatcher.fleet.suspect(s.running.services.dispatcher.fleet.alive("decode")[-1])
        chunks = await s.streamed()
        assert content(chunks) == "the quick brown fox"
        assert chunks[-1].kvpool["retries"] == 1
        assert chunks[-1].kvpool["decode_worker"] == "f" * 32
        await until(lambda: b"kvpool_router_retries_total 1.0" in s.running.services.metrics.render())


async def test_failure_before_the_first_token_has_a_status_even_in_a_stream(model: TextModel) -> None:
    """Nothing was sent, so a plain error still can be."""
    async with stage(model, "x", limits=Limits(max_failures=1)) as s:
        for streamed in (True, False):
            s.prefill.faults.append(Fault(kind="die"))
            with pytest.raises(openai.InternalServerError) as caught:
                await s.chat(stream=streamed)
            assert (caught.value.status_code, caught.value.code) == (503, "service_unavailable")


async def test_failure_midway_is_the_last_event_of_the_stream(model: TextModel) -> None:
    """The caller must not take a broken answer for a whole one."""
    async with stage(model, "the quick brown fox", limits=Limits(max_failures=1)) as s:
        s.decode.faults.append(Fault(kind="die", after=4))
        seen: list[Any] = []

        async def read() -> None:
            async for chunk in await s.chat(stream=True):
                seen.append(chunk)  # noqa: PERF401  a comprehension would lose them to the error

        with pytest.raises(openai.APIError, match="given up"):
            await read()
        assert "the quick brown fox".startswith(content(seen))
        assert content(seen)
        assert all(chunk.choices[0].finish_reason is None for chunk in seen)


async def test_deadline_is_a_504(model: TextModel) -> None:
    """The one error that says: it was going, but not fast enough."""
    async with stage(model, "a block ", forever=True, delay_s=0.05, limits=Limits(request_timeout_s=0.5)) as s:
        with pytest.raises(openai.InternalServerError) as caught:
            await s.chat()
        assert (caught.value.status_code, caught.value.code) == (504, "timeout")


async def test_worker_that_refuses_is_a_400(model: TextModel) -> None:
    """The worker's reason reaches the caller."""
    async with stage(model, "x") as s:
        s.prefill.faults.append(Fault(kind="refuse"))
        with pytest.raises(openai.BadRequestError, match="does not like this request"):
            await s.chat()


async def test_models_are_listed(model: TextModel) -> None:
    """Clients look before they ask."""
    async with stage(model, "x") as s:
        listed = (await s.client.models.list()).data
        assert [entry.id for entry in listed] == [NAME]
        assert (await s.client.models.retrieve(NAME)).id == NAME
        with pytest.raises(openai.NotFoundError) as caught:
            await s.client.models.retrieve("gpt-5")
        assert caught.value.code == "model_not_found"


def test_synchronous_client_works_too(model: TextModel, tmp_path: Path) -> None:
    """Most scripts use it; from another thread, as they are another process."""

    async def work() -> tuple[str, str]:
        async with stage(model, "the lazy dog") as s:
            return await asyncio.to_thread(ask, s.running.url)

    def ask(url: str) -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:
            whole = client.chat.completions.create(model=NAME, messages=USER).choices[0].message.content or ""
            with client.chat.completions.create(model=NAME, messages=USER, stream=True) as stream:
                return whole, "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)

    assert asyncio.run(work()) == ("the lazy dog", "the lazy dog")
