"""Two workers and a pool node over real sockets and real shared memory, in one process: what a router will see."""

import asyncio
import re
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic_ns
from typing import Any

import pytest

from kvpool.block import chain_keys
from kvpool.cluster import Member, open_membership
from kvpool.cluster.memory import MemoryStore
from kvpool.engine.model import Model, load_model
from kvpool.engine.reference import Reference
from kvpool.engine.settings import EngineSettings, Role, WorkerConfig
from kvpool.engine.worker import WorkerApp
from kvpool.errors import ConfigError, UnavailableError
from kvpool.node.service import NodeConfig, PoolNode
from kvpool.policy.prefix import PrefixIndex
from kvpool.policy.routing import WorkerRef
from kvpool.request import (
    DecodeRequest,
    Finished,
    FinishReason,
    FirstToken,
    PrefillRequest,
    Published,
    Started,
    TokenOut,
    TokenSources,
)
from kvpool.transport import host_boot_id
from kvpool.units import MIB, SECOND
from kvpool.wire.worker_client import WorkerClient
from router.feeds import MemberFeeds, dial

PROMPT = tuple((31 * i * i + 7) % 256 for i in range(77))
SETTINGS = EngineSettings(chunk_tokens=32, resident_bytes=0, kv_bytes=64 * MIB)


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_model(tiny, dtype="float32", block_tokens=8)


@pytest.fixture
def url() -> str:
    return f"memory://workers-{uuid.uuid4().hex}?lease_ms=500"


@asynccontextmanager
async def running(model: Model, role: Role, cluster: str | None, **settings: Any) -> AsyncIterator[tuple[WorkerApp, WorkerClient]]:
    config = {"role": role, "served_name": "tiny", "cluster": cluster, "drain_s": 0.5, "settings": SETTINGS} | settings
    app = WorkerApp(WorkerConfig(**config), model)
    try:
        await app.start()
        client = WorkerClient(app.address)
        try:
            yield app, client
        finally:
            await client.close()
    finally:
        await app.stop()


@asynccontextmanager
async def node_of(url: str, directory: Path) -> AsyncIterator[PoolNode]:
    membership = await asyncio.to_thread(open_membership, url)
    node = PoolNode(NodeConfig(capacity_bytes=16 * MIB, arena_directory=directory, offers=("shm", "grpc")), membership)
    try:
        await node.start()
        yield node
    finally:
        await node.stop()
        await asyncio.to_thread(membership.close)


@pytest.fixture(scope="module")
def generate(tiny: Path) -> Callable[[int], list[int]]:
    """What `transformers` itself makes of the prompt."""
    return lambda count: Reference(tiny, "float32").generate(list(PROMPT), count)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`, for at most ten seconds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_workers_hand_a_request_over_through_the_pool(
    model: Model, url: str, tmp_path: Path, generate: Callable[[int], list[int]]
) -> None:
    """Prefill here, decode there, KV through the node's memory: the tokens of a single process, nothing computed twice."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(node_of(url, tmp_path))
        prefiller, prefill = await stack.enter_async_context(running(model, "prefill", url))
        _, decode = await stack.enter_async_context(running(model, "decode", url))
        first, published = [e async for e in prefill.prefill(PrefillRequest(request_id="r", prompt=PROMPT), 30)]
        assert isinstance(first, FirstToken)
        assert published == Published(tokens=77, blocks_written=10)
        request = DecodeRequest(request_id="r", prompt=PROMPT, generated=(first.token,), max_tokens=12)
        started, *tokens, finished = [e async for e in decode.decode(request, 30)]
        again, _ = [e async for e in prefill.prefill(PrefillRequest(request_id="r2", prompt=PROMPT), 30)]
        status = await prefill.status(5)
        await until(lambda: prefiller._engine is not None and prefiller._engine.status(role="", model="").active_requests == 0)
    assert isinstance(started, Started)
    assert started.sources == TokenSources(pool=77)
    assert [first.token, *(t.token for t in tokens if isinstance(t, TokenOut))] == generate(12)
    assert finished == Finished(reason=FinishReason.LENGTH)
    assert isinstance(again, FirstToken)
    assert again.sources == TokenSources(pool=72, computed=5)
    assert (status.role, status.model, list(status.reaches.values())) == ("prefill", "tiny", ["shm"])
    assert status.prefill_tokens_per_s > 0


async def test_worker_tells_the_cluster_who_it_is_and_leaves_when_stopped(model: Model, url: str) -> None:
    """A router needs the model's name, the blocks' namespace and the limits, and must not send to a worker that stops."""
    watcher = await asyncio.to_thread(open_membership, url)
    try:
        async with running(model, "decode", url) as (app, _):
            await app.joined()
            members = await asyncio.to_thread(watcher.wait, lambda view: bool(view), monotonic_ns() + 10 * SECOND)
            (member,) = members
            assert isinstance(member, Member)
            assert (member.role, member.address) == ("decode", app.address)
            root = model.namespace.root().hex()
            fields = model.namespace.canonical().hex()
            assert re.fullmatch("[0-9a-f]{32}/[0-9]+", member.info["events"])
            assert member.info == {
                "model": "tiny",
                "namespace": root,
                "fields": fields,
                "block_tokens": "8",
                "max_tokens": "512",
                "slots": str(SETTINGS.max_active),
                "kv_tokens": str(SETTINGS.kv_bytes // model.geometry.bytes_per_token),
                "token_bytes": str(model.geometry.bytes_per_token),
                "host": host_boot_id(),
                "events": member.info["events"],
                "attention": "full",
            }
        assert await asyncio.to_thread(watcher.wait, lambda view: not view, monotonic_ns() + 10 * SECOND) == ()
    finally:
        await asyncio.to_thread(watcher.close)


async def test_worker_joins_when_the_membership_store_comes_back(model: Model, url: str) -> None:
    """A worker that starts while the store is down serves, and is found as soon as the store is up."""
    name = url.removeprefix("memory://").partition("?")[0]
    watcher = await asyncio.to_thread(open_membership, url)
    MemoryStore.named(name).reachable = False
    try:
        async with running(model, "decode", url) as (app, client):
            assert (await client.status(5)).role == "decode"
            MemoryStore.named(name).reachable = True
            async with asyncio.timeout(10):
                await app.joined()
    finally:
        await asyncio.to_thread(watcher.close)


async def test_worker_refuses_the_other_role(model: Model) -> None:
    """A router that mixed the roles up is told so, as an error of its own."""
    async with running(model, "prefill", None) as (_, client):
        with pytest.raises(ConfigError, match="this is a prefill worker; it doesn't decode"):
            await anext(client.decode(DecodeRequest(request_id="r", prompt=(1,), max_tokens=1), 5))
    async with running(model, "decode", None) as (_, client):
        with pytest.raises(ConfigError, match="this is a decode worker; it doesn't prefill"):
            await anext(client.prefill(PrefillRequest(request_id="r", prompt=(1,)), 5))


async def test_worker_that_cannot_listen_says_so_and_holds_nothing(model: Model) -> None:
    """A failed start is a clear error and leaves no thread behind."""
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="not an address"):
        async with running(model, "decode", None, listen="nowhere"):
            pass
    assert not [thread for thread in threading.enumerate() if thread.name == "kvpool-compute" and thread not in before]


async def test_worker_without_a_pool_decodes_alone(model: Model, generate: Callable[[int], list[int]]) -> None:
    """No cluster, no prefill worker: the decode worker does it all."""
    async with running(model, "decode", None) as (_, client):
        events = [e async for e in client.decode(DecodeRequest(request_id="r", prompt=PROMPT, max_tokens=3), 30)]
    assert [e.token for e in events if isinstance(e, TokenOut)] == generate(3)


async def test_worker_whose_client_hangs_up_stops_the_work(model: Model) -> None:
    """The sequence's place is free again soon after the stream is closed."""
    async with running(model, "decode", None) as (app, client):
        stream: Any = client.decode(DecodeRequest(request_id="r", prompt=PROMPT, max_tokens=400), 30)
        for _ in range(5):
            await anext(stream)
        assert (await client.status(5)).active_requests == 1
        await stream.aclose()
        await until(lambda: app._engine is not None and app._engine.status(role="", model="").active_requests == 0)
        assert (await client.status(5)).finished_requests == 0


async def test_worker_told_to_stop_says_so_serves_what_it_has_and_leaves(
    model: Model, url: str, generate: Callable[[int], list[int]]
) -> None:
    """A router sends it nothing new from then on, and nobody's answer is cut off."""
    watcher = await asyncio.to_thread(open_membership, url)

    def seen(state: str | None) -> Callable[[tuple[Member, ...]], bool]:
        return lambda view: [member.info.get("state") for member in view] == ([state] if state else [])

    try:
        async with running(model, "decode", url, drain_s=20.0) as (app, client):
            await app.joined()
            stream: Any = client.decode(DecodeRequest(request_id="r", prompt=PROMPT, max_tokens=100), 30)
            tokens = [event.token for event in [await anext(stream) for _ in range(3)] if isinstance(event, TokenOut)]
            stopping = asyncio.create_task(app.stop())
            await asyncio.to_thread(watcher.wait, seen("draining"), monotonic_ns() + 10 * SECOND)
            tokens += [event.token async for event in stream if isinstance(event, TokenOut)]
            await stopping
            await asyncio.to_thread(watcher.wait, seen(None), monotonic_ns() + 10 * SECOND)
        assert tokens == generate(100)
    finally:
        await asyncio.to_thread(watcher.close)


async def test_worker_stopped_under_load_cancels_what_outlasts_the_drain(model: Model) -> None:
    """A stop is bounded: a stream that would go on ends in an error on which a router tries another worker."""
    async with running(model, "decode", None, drain_s=0.0) as (app, client):
        stream = client.decode(DecodeRequest(request_id="r", prompt=PROMPT[:4], max_tokens=500), 30)
        await anext(stream)
        async with asyncio.timeout(20):
            await app.stop()
        with pytest.raises(UnavailableError):
            async for _ in stream:
                pass


async def test_router_knows_what_a_worker_holds_by_its_own_word(model: Model, url: str) -> None:
    """Snapshot and changes over gRPC, under the keys that a router makes of a prompt; gone with the worker."""
    membership = await asyncio.to_thread(open_membership, url)
    index: PrefixIndex[WorkerRef] = PrefixIndex()
    feeds = MemberFeeds(membership, index, dial())
    keys = chain_keys(model.namespace.root(), PROMPT, 8)
    settings = EngineSettings(chunk_tokens=32, resident_bytes=MIB, kv_bytes=64 * MIB)
    try:
        async with running(model, "decode", url, settings=settings) as (app, client):
            await app.joined()
            feeds.start()
            async for _ in client.decode(DecodeRequest(request_id="r", prompt=PROMPT, max_tokens=4), 60):
                continue
            async with asyncio.timeout(30):
                while list(index.match(keys).leading().values()) != [9]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            (worker,) = index.match(keys).leading()
            assert feeds.tells(worker)
            late: PrefixIndex[WorkerRef] = PrefixIndex()
            again = MemberFeeds(membership, late, dial())
            again.start()
            async with asyncio.timeout(30):
                while not again.tells(worker):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert late.match(keys).of(worker) == index.match(keys).of(worker)
            await again.close()
        async with asyncio.timeout(30):
            while index.holders():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        await feeds.close()
        await asyncio.to_thread(membership.close)
