"""A router in front of stock engines, which it knows by nothing but their HTTP API and their ZMQ events."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvpool.block import chain_keys
from kvpool.clock import MonotonicClock
from kvpool.policy.routing import WorkerRef
from kvpool.request import Scope
from router.settings import Limits
from router.stock.feeds import EngineFeeds
from router.stock.place import EnginePlace
from router.stock.roster import EngineRoster
from router.testing.model import NAME, tiny_model
from router.testing.server import Running, serving
from router.testing.stock import StockServer
from router.testing.vllm import stored
from router.text.model import TextModel

BLOCK = 16
LIMITS = Limits(request_timeout_s=20.0, stall_timeout_s=5.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """One tiny model for all tests here."""
    return tiny_model(tmp_path_factory.mktemp("model"))


def prompt(number: int, blocks: int = 6) -> tuple[int, ...]:
    """A prompt that shares no block with another."""
    return tuple((7 * number + 13 * i + i // BLOCK) % 300 for i in range(blocks * BLOCK + 3))


class Front:
    """A router and its engines."""

    def __init__(self, running: Running, http: httpx.AsyncClient, roster: EngineRoster, engines: list[StockServer]) -> None:
        self.running = running
        self.http = http
        self.roster = roster
        self.engines = engines

    async def ask(self, tokens: tuple[int, ...], **more: Any) -> httpx.Response:
        """One completion of four tokens."""
        body = {"model": NAME, "prompt": list(tokens), "max_tokens": 4, "temperature": 0, "ignore_eos": True, **more}
        return await self.http.post("/v1/completions", json=body)

    def asked(self) -> list[int]:
        """Requests that each engine has had."""
        return [len(engine.bodies) for engine in self.engines]

    def held(self, engine: StockServer, tokens: tuple[int, ...]) -> int:
        """Leading blocks of a prompt that the index has for the engine now."""
        fleet, index = self.running.services.dispatcher.fleet, self.running.services.dispatcher.holdings.index
        for worker in fleet.alive("decode"):
            if worker.ref.id == EnginePlace.parse(engine.url).id:
                return index.match(chain_keys(worker.root, tokens, BLOCK)).of(worker.ref)
        return 0

    async def lives(self, count: int) -> None:
        """Wait until the router counts so many engines."""
        await until(lambda: len(self.running.services.dispatcher.fleet.alive("decode")) == count)

    def ref(self, engine: StockServer) -> WorkerRef:
        """Who the engine is now."""
        return next(w.ref for w in self.running.services.dispatcher.fleet.alive("decode") if w.ref.id == EnginePlace.parse(engine.url).id)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it, with patience for a busy machine."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  the condition is in plain objects
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def front(model: TextModel, count: int = 2, *, limits: Limits = LIMITS, **options: Any) -> AsyncIterator[Front]:
    """A router in front of `count` engines that live."""
    engines = [StockServer(lambda prompt, position: 40 + position, **options) for _ in range(count)]
    for engine in engines:
        await engine.start()
    roster = EngineRoster([EnginePlace.parse(engine.url) for engine in engines], model.name, MonotonicClock(), ask_s=0.02)
    roster.start()
    try:
        feed = partial(EngineFeeds, silence_s=0.2)
        async with (
            serving(model, roster, limits=limits, direct=True, feed=feed) as running,
            httpx.AsyncClient(base_url=running.url, timeout=30) as http,
        ):
            one = Front(running, http, roster, engines)
            await one.lives(count)
            yield one
    finally:
        await roster.close()
        for engine in engines:
            await engine.stop()


async def test_repeats_go_to_the_holder_by_its_events_alone(model: TextModel) -> None:
    """What the router never saw computed: only the engines' events can say where it is."""
    async with front(model) as one:
        prompts = [prompt(i) for i in range(10)]
        for i, tokens in enumerate(prompts):
            await one.engines[i % 2].fill(tokens)
        await until(lambda: all(one.held(one.engines[i % 2], tokens) == 6 for i, tokens in enumerate(prompts)))
        for i, tokens in enumerate(prompts):
            before = one.asked()
            answer = await one.ask(tokens)
            assert answer.status_code == 200
            assert one.asked()[i % 2] == before[i % 2] + 1
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 6 * BLOCK
        assert all(cached == 6 * BLOCK for engine in one.engines for cached in engine.cached)


async def test_adapter_is_a_model_of_the_engines_that_have_it(model: TextModel) -> None:
    """Others are no candidates, however much of the prompt they hold; its KV is found again under keys of its own, with a salt too."""
    async with front(model) as one:
        with_it, without = one.engines
        tokens = prompt(3)
        await without.fill(tokens)
        await with_it.fill(tokens)
        await until(lambda: one.held(without, tokens) == one.held(with_it, tokens) == 6)
        assert (await one.ask(tokens, model="poet")).status_code == 404
        with_it.adapters = ("poet",)
        services = one.running.services
        await until(lambda: "poet" in services.adapters())
        listed = (await one.http.get("/v1/models")).json()["data"]
        assert [(each["id"], each.get("parent")) for each in listed] == [(NAME, None), ("poet", NAME)]
        assert (await one.http.get("/v1/models/poet")).json() == listed[1]
        for salt in ({}, {"cache_salt": "mine"}):
            cached = []
            for _ in range(2):
                answer = await one.ask(tokens, model="poet", **salt)
                assert answer.status_code == 200
                assert answer.json()["model"] == with_it.bodies[-1]["model"] == "poet"
                cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert cached == [0, 6 * BLOCK]
        assert one.asked() == [4, 0]
        (worker,) = [w for w in services.dispatcher.fleet.alive("decode") if w.adapters]
        roots, index = [worker.root_of(Scope()), worker.root_of(Scope(), "poet")], services.dispatcher.holdings.index
        await until(lambda: [index.match(chain_keys(r, tokens, BLOCK)).of(worker.ref) for r in roots] == [6, 6])
        assert len({*roots, worker.root_of(Scope(salt=b"s" * 32)), worker.root_of(Scope(salt=b"s" * 32), "poet")}) == 4
        assert (await one.ask(tokens)).json()["model"] == NAME
        with_it.adapters = ()
        await until(lambda: not services.adapters())
        assert (await one.ask(tokens, model="poet")).status_code == 404


async def test_explain_and_metrics_show_engines_like_other_workers(model: TextModel) -> None:
    """The same index and the same policies."""
    async with front(model) as one:
        await one.engines[1].fill(prompt(1))
        await until(lambda: one.held(one.engines[1], prompt(1)) == 6)
        answer = await one.http.post(
            "/v1/completions", json={"model": NAME, "prompt": list(prompt(1)), "max_tokens": 1}, headers={"x-request-id": "why"}
        )
        assert answer.status_code == 200
        found = (await one.http.get("/kvpool/explain/why")).json()
        (decision,) = found["jobs"][0]["decisions"]
        assert EnginePlace.parse(one.engines[1].url).id in decision["chosen"]
        assert len(decision["candidates"]) == 2
        text = (await one.http.get("/metrics")).text
        assert 'kvpool_router_feed_events_total{what="stored"}' in text


async def test_engine_that_restarts_is_another_worker_with_nothing(model: TextModel) -> None:
    """The same address: what the old one held is gone with it, and what the new one computes is found again."""
    async with front(model) as one:
        first = one.engines[0]
        await first.fill(prompt(1))
        await until(lambda: one.held(first, prompt(1)) == 6)
        before = one.ref(first)
        await first.stop()
        await one.lives(1)
        first._held.clear()
        first.engine.begin_anew()
        await first.start()
        await one.lives(2)
        assert one.ref(first) != before
        assert one.held(first, prompt(1)) == 0
        assert before not in one.running.services.dispatcher.holdings.index.holders()
        await first.fill(prompt(2))
        await until(lambda: one.held(first, prompt(2)) == 6)


async def test_restart_that_nobody_noticed_is_told_by_the_events(model: TextModel) -> None:
    """Up again before the router asked for its health."""
    async with front(model) as one:
        first = one.engines[0]
        await first.fill(prompt(1))
        await until(lambda: one.held(first, prompt(1)) == 6)
        first._held.clear()
        await first.engine.restart()
        await first.fill(prompt(2))
        await until(lambda: one.held(first, prompt(1)) == 0 and one.held(first, prompt(2)) == 6)


async def test_cache_reset_empties_the_engine(model: TextModel) -> None:
    """Nobody is sent there for what was."""
    async with front(model) as one:
        first = one.engines[0]
        await first.fill(prompt(1))
        await until(lambda: one.held(first, prompt(1)) == 6)
        await first.reset()
        await until(lambda: one.held(first, prompt(1)) == 0)


async def test_lost_events_are_replayed(model: TextModel) -> None:
    """Whether one comes after them or not."""
    async with front(model) as one:
        first = one.engines[0]
        first.lossy = True
        await first.fill(prompt(1))
        first.lossy = False
        await first.fill(prompt(2))
        await until(lambda: one.held(first, prompt(1)) == 6 and one.held(first, prompt(2)) == 6)
        first.lossy = True
        await first.fill(prompt(3))
        await until(lambda: one.held(first, prompt(3)) == 6)


async def test_engine_that_claims_what_it_lacks_is_not_believed(model: TextModel) -> None:
    """Its own count at the end of each answer says that the blocks weren't there."""
    async with front(model) as one:
        liar = one.engines[0]
        for i in range(8):
            await liar.engine.say(stored(prompt(i), BLOCK))
        await until(lambda: all(one.held(liar, prompt(i)) == 6 for i in range(8)))
        index = one.running.services.dispatcher.holdings.index
        for i in range(4):
            liar._held.clear()
            await one.ask(prompt(i))
        assert index.credited(one.ref(liar), 16) <= 4


async def test_engine_that_counts_nothing_keeps_its_credit(model: TextModel) -> None:
    """Without --enable-prompt-tokens-details nothing is proved, either way."""
    async with front(model, 1, details=False) as one:
        await one.engines[0].fill(prompt(1))
        await until(lambda: one.held(one.engines[0], prompt(1)) == 6)
        answer = await one.ask(prompt(1))
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert one.running.services.dispatcher.holdings.index.credited(one.ref(one.engines[0]), 6) == 6


async def test_engine_that_breaks_in_the_middle_is_followed_by_another(model: TextModel) -> None:
    """The other goes on behind what was said."""
    async with front(model) as one:
        await one.engines[0].fill(prompt(1))
        await until(lambda: one.held(one.engines[0], prompt(1)) == 6)
        one.engines[0].cut_after = 2
        answer = (await one.ask(prompt(1), return_token_ids=True)).json()
        assert answer["kvpool"]["token_ids"][:2] == [40, 41]
        assert len(answer["kvpool"]["token_ids"]) == 4
        assert answer["kvpool"]["retries"] == 1
        (body,) = one.engines[1].bodies
        assert (body["prompt"], body["max_tokens"]) == ([*prompt(1), 40, 41], 2)


async def test_engine_that_is_unwell_is_passed_over(model: TextModel) -> None:
    """An error from one is not the caller's, as long as there is another."""
    async with front(model) as one:
        one.engines[0].ill = 503
        await one.lives(1)
        answers = await asyncio.gather(*(one.ask(prompt(i)) for i in range(6)))
        assert {answer.status_code for answer in answers} == {200}
        one.engines[0].ill = 0
        await one.lives(2)


async def test_request_that_the_engine_refuses_is_the_callers(model: TextModel) -> None:
    """With the engine's own words, and asked of nobody else."""
    async with front(model) as one:
        for engine in one.engines:
            engine.ill = 400
        answer = await one.ask(prompt(1))
        assert answer.status_code == 400
        assert "does not like this" in answer.json()["error"]["message"]
        assert sum(one.asked()) == 1


async def test_caller_that_hangs_up_ends_the_engines_work(model: TextModel) -> None:
    """The connection is closed, which is how a stock engine is told."""
    async with front(model, 1) as one:
        engine = one.engines[0]
        engine.delay_s = 0.02
        body = {"model": NAME, "prompt": list(prompt(1)), "max_tokens": 300, "stream": True, "ignore_eos": True}
        async with one.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            first = next_data(await anext(lines))
            assert first["choices"][0]["text"]
        await until(lambda: engine.gone == 1)


async def test_deadline_ends_the_engines_work(model: TextModel) -> None:
    """504 while somebody works on it, and the work ends."""
    async with front(model, 1) as one:
        one.engines[0].delay_s = 0.05
        answer = await one.ask(prompt(1), max_tokens=300, timeout=0.5)
        assert answer.status_code == 504
        await until(lambda: one.engines[0].gone == 1)


async def test_no_engine_is_no_health(model: TextModel) -> None:
    """A gateway must not send anybody."""
    async with front(model, 1) as one:
        await one.engines[0].stop()
        await one.lives(0)
        assert (await one.http.get("/health")).status_code == 503
        await one.engines[0].start()
        await one.lives(1)
        assert (await one.http.get("/health")).status_code == 200


async def test_chat_streams_text_of_an_engine(model: TextModel, tmp_path: Path) -> None:
    """Template, detokeniser, log-probabilities and stop strings are the router's, as for its own workers."""
    async with front(model, 1) as one:
        words = [*model.encode("the quick brown fox", rendered=False), *model.stop_tokens]
        one.engines[0].answer = lambda prompt, position: words[position]
        body = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
        answer = (await one.http.post("/v1/chat/completions", json=body)).json()
        assert answer["choices"][0]["message"]["content"] == "the quick brown fox"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]] == [-0.5] * (len(words) - 1)
        stopped = (
            await one.http.post("/v1/chat/completions", json={**body, "logprobs": False, "top_logprobs": None, "stop": "brown"})
        ).json()
        assert stopped["choices"][0]["message"]["content"] == "the quick "


def next_data(line: str) -> Any:
    """What one event of a stream holds."""
    return json.loads(line.removeprefix("data: "))
