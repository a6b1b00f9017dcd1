"""Who is an engine of this router, and who isn't."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from kvpool.clock import MonotonicClock
from kvpool.errors import ConfigError
from kvpool.request import DecodeRequest, Finished, FinishReason, Started, TokenOut, TokenSources
from router.stock.place import EnginePlace
from router.stock.roster import KV_EVENTS, KV_REPLAY, EngineRoster, root_of
from router.testing.stock import StockServer
from router.worker import Said, adapters_in


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  the condition is in plain objects
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def engine(**options: object) -> AsyncIterator[StockServer]:
    one = StockServer(lambda prompt, position: 40 + position, **options)  # type: ignore[arg-type]
    await one.start()
    try:
        yield one
    finally:
        await one.stop()


@contextlib.asynccontextmanager
async def roster(*texts: str) -> AsyncIterator[EngineRoster]:
    one = EngineRoster([EnginePlace.parse(text) for text in texts], "m", MonotonicClock(), ask_s=0.02)
    one.start()
    try:
        yield one
    finally:
        await one.close()


async def test_engine_says_what_a_router_must_know() -> None:
    """Context, blocks, memory, where its events are: all asked of itself."""
    async with engine(block_size=32, kv_blocks=100) as one, roster(one.url) as found:
        await until(lambda: bool(found.members("decode")))
        (member,) = found.members()
        said = Said.of(member.info)
        assert (said.root, said.block_tokens, said.context_tokens, said.kv_tokens) == (root_of("m"), 32, 4096, 3200)
        assert member.info[KV_EVENTS] == one.engine.endpoint
        assert member.info[KV_REPLAY] == one.engine.replay_endpoint
        assert member.incarnation == int(one.started_s * 1000)
        assert (found.members("node"), found.quarantined()) == ((), frozenset())


async def test_adapters_are_those_with_a_parent_and_may_come_and_go() -> None:
    """As vLLM lists them, before the model or behind it; an engine stays who it is when it loads one."""
    async with engine(adapters=("poet", "a/b, c")) as one, roster(one.url) as found:
        await until(lambda: bool(found.members()))
        (before,) = found.members()
        assert adapters_in(before.info) == {"poet", "a/b, c"}
        assert found.connect(before.address)._model == "served"
        one.adapters = ("sql",)
        await until(lambda: adapters_in(found.members()[0].info) == {"sql"})
        assert found.members()[0].identity == before.identity


async def test_two_routers_agree_on_who_an_engine_is() -> None:
    """So what one says of its load there means something to the other."""
    async with engine() as one, roster(one.url) as a, roster(one.url + "/v1") as b:
        await until(lambda: bool(a.members() and b.members()))
        assert a.members()[0].identity == b.members()[0].identity


async def test_engine_comes_and_goes_and_everybody_is_told() -> None:
    """At once when its address refuses."""
    async with engine() as one, roster(one.url) as found:
        told: list[int] = []
        end = found.subscribe(lambda members: told.append(len(members)))
        await until(lambda: told[-1] == 1)
        await one.stop()
        await until(lambda: told[-1] == 0)
        await one.start()
        await until(lambda: told[-1] == 1)
        one.ill = 500
        await until(lambda: told[-1] == 0)
        end()
        one.ill = 0
        await until(lambda: bool(found.members()))
        assert told[-1] == 0


async def test_flags_come_before_what_the_engine_says() -> None:
    """An engine behind a gateway publishes elsewhere than it thinks."""
    async with engine() as one, roster(f"{one.url},events=tcp://127.0.0.1:1,model=served") as found:
        await until(lambda: bool(found.members()))
        assert found.members()[0].info[KV_EVENTS] == "tcp://127.0.0.1:1"


async def test_engine_without_events_serves_all_the_same() -> None:
    """What it holds is guessed from what it was sent."""
    async with engine(tells_events=False) as one, roster(one.url) as found:
        await until(lambda: bool(found.members()))
        assert KV_EVENTS not in found.members()[0].info


async def test_engine_that_lacks_the_model_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """And the log says so once, not every second."""
    async with engine() as one, roster(f"{one.url},model=other") as found:
        await until(lambda: "lists no model called 'other'" in caplog.text)
        await asyncio.sleep(0.1)
        assert found.members() == ()
        assert caplog.text.count("lists no model") == 1


async def test_port_speaks_for_the_engine() -> None:
    """Tokens in, tokens out; at the end what it had; and how busy it is."""
    async with engine() as one, roster(one.url) as found:
        await until(lambda: bool(found.members()))
        port = found.connect(found.members()[0].address)
        request = DecodeRequest(request_id="r", prompt=tuple(range(40)), max_tokens=2)
        events = [event async for event in port.decode(request, 20)]
        assert isinstance(events[0], Started)
        assert events[1:3] == [TokenOut(token=40), TokenOut(token=41)]
        last = events[3]
        assert isinstance(last, Finished)
        assert last.reason is FinishReason.LENGTH
        assert last.account is not None
        assert last.account.sources == TokenSources(computed=40)
        assert last.account.times.compute_ns > 0
        again = [event async for event in port.decode(request, 20)][-1]
        assert isinstance(again, Finished)
        assert again.account is not None
        assert again.account.sources == TokenSources(resident=32, computed=8)
        assert (await port.status(20)).active_requests == 0
        with pytest.raises(ConfigError, match="prefills for nobody"):
            port.prefill(None, 1)  # type: ignore[arg-type]
        await port.close()


def test_engine_is_named_once() -> None:
    """Twice would be two workers with one memory."""
    with pytest.raises(ConfigError, match="twice"):
        EngineRoster([EnginePlace.parse("http://e:1"), EnginePlace.parse("http://e:1/v1")], "m", MonotonicClock())
