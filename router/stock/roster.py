"""Which stock engines live: each is asked for its health once a second, and who answers is a decode worker of this router.

Theory. An engine is in no cluster's membership, so the router finds out itself, and shows what it found as a `ClusterView` in which
engines are the only members. An engine that comes (again) is asked what it serves, adapters included, how its memory is cut into blocks,
and where it publishes its events; from then on it is a member, under an id made from its URL and an incarnation that is the time its
process started (or, if it doesn't say, when it was found), so that routers agree on both. It is gone at once when its address refuses or
its health is an error, and after `PATIENCE` times without an answer: a busy server may be slow to say that it is well.

A restart that is over before the next question goes unnoticed here; the engine's events tell of it (`router/feeds/vllm.py`).
"""

import asyncio
import hashlib
import logging
import re
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from kvpool.block import MAX_BLOCK_TOKENS
from kvpool.clock import Clock
from kvpool.cluster import ClusterConfig, Identity, Member
from kvpool.errors import ConfigError, DeadlineError, KvpoolError, ProtocolError
from router.stock.http import ask
from router.stock.place import EnginePlace
from router.stock.port import StockPort
from router.worker import ADAPTERS

log = logging.getLogger("router.stock")

KV_EVENTS: Final = "kv_events"
KV_REPLAY: Final = "kv_replay"
KV_TOPIC: Final = "kv_topic"
"""In an engine's info: where it publishes its events and replays them, and what its messages begin with."""
PATIENCE: Final = 3
_LIST_EVERY: Final = 10
"""Looks: adapters may be loaded and unloaded while an engine runs."""
MAX_ADAPTERS: Final = 1024
"""Of one engine; those with later names don't count."""
_ASK_S: Final = 1.0
_ANSWER_S: Final = 5.0
_BLOCK_TOKENS: Final = 16
"""Of keys for an engine that doesn't tell the size of its blocks."""
_BLOCK_SIZE = re.compile(r'^vllm:cache_config_info\{(?:[^}]*,)?block_size="(\d{1,4})"', re.MULTILINE)
_BLOCKS = re.compile(r'^vllm:cache_config_info\{(?:[^}]*,)?num_gpu_blocks="(\d{1,12})"', re.MULTILINE)
_STARTED = re.compile(r"^process_start_time_seconds ([0-9.e+]{1,32})$", re.MULTILINE)


def root_of(model: str) -> bytes:
    """The root of the keys of stock engines' blocks: nobody else's, as nobody else can use their KV."""
    return hashlib.sha256(b"stock engine\0" + model.encode()).digest()


class EngineRoster:
    """A `ClusterView` of those of `places` that live and serve. Lives on one event loop: `start`, then `await close()`."""

    def __init__(
        self, places: Sequence[EnginePlace], model: str, clock: Clock, context: ssl.SSLContext | None = None, *, ask_s: float = _ASK_S
    ) -> None:
        """`model`: what the router calls it; `context`: for engines behind HTTPS. Raises `ConfigError` for an engine named twice."""
        self._places = {place.address: place for place in places}
        if len(self._places) < len(places):
            raise ConfigError("an engine is named twice")
        self._model = model
        self._clock = clock
        self._context = context or ssl.create_default_context()
        self._ask_s = ask_s
        self._there: dict[str, Member] = {}
        self._called: dict[str, str] = {}
        self._members: tuple[Member, ...] = ()
        self._callbacks: list[Callable[[tuple[Member, ...]], None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.config = ClusterConfig()

    def start(self) -> None:
        """Look for the engines from now on; call on the event loop."""
        self._tasks = [asyncio.create_task(self._follow(place)) for place in self._places.values()]

    async def close(self) -> None:
        """Stop looking; the view stays as it is."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    def connect(self, address: str) -> StockPort:
        """The port to the engine at `address`, which lives or did a moment ago."""
        place = self._places[address]
        return StockPort(place, self._called[address], self._clock, self._context_of(place))

    def members(self, role: str | None = None) -> tuple[Member, ...]:
        """See `ClusterView`."""
        return self._members if role in (None, "decode") else ()

    def quarantined(self) -> frozenset[Identity]:
        """See `ClusterView`: nobody."""
        return frozenset()

    def subscribe(self, callback: Callable[[tuple[Member, ...]], None]) -> Callable[[], None]:
        """See `ClusterView`."""
        self._callbacks.append(callback)
        callback(self._members)
        return lambda: self._callbacks.remove(callback)

    async def _follow(self, place: EnginePlace) -> None:
        """Until the end: whether it is there."""
        silent, said, looks = 0, "", 0
        while True:
            looks += 1
            try:
                if place.address in self._there:
                    await self._get(place, "/health")
                    if looks % _LIST_EVERY == 0:
                        await self._list(place, self._there[place.address])
                else:
                    self._show(place, await self._meet(place))
                    log.info("the engine at %s serves: %s", place.address, self._there[place.address].info)
                silent, said = 0, ""
            except KvpoolError as error:
                silent = silent + 1 if isinstance(error, DeadlineError) else PATIENCE
                if str(error) != said and (silent >= PATIENCE or place.address not in self._there):
                    said = str(error)
                    log.warning("the engine at %s can't be used now: %s", place.address, error)
                if silent >= PATIENCE:
                    self._show(place, None)
            await asyncio.sleep(self._ask_s)

    async def _list(self, place: EnginePlace, member: Member) -> None:
        """Ask an engine that is there which adapters it has now."""
        adapters = _adapters_of(_json(place, await self._get(place, "/v1/models")))
        if adapters != member.info[ADAPTERS]:
            log.info("the engine at %s has the adapters %s", place.address, adapters)
            self._show(place, replace(member, info={**member.info, ADAPTERS: adapters}))

    async def _meet(self, place: EnginePlace) -> Member:
        """Ask an engine what it is. Raises a `KvpoolError`: it is not there, or not to be used."""
        await self._get(place, "/health")
        listed = _json(place, await self._get(place, "/v1/models"))
        self._called[place.address], tokens = _model_of(place, listed)
        metrics = (await self._get(place, "/metrics")).decode(errors="replace")
        size, blocks, started = (pattern.search(metrics) for pattern in (_BLOCK_SIZE, _BLOCKS, _STARTED))
        block_tokens = int(size.group(1)) if size is not None and 1 <= int(size.group(1)) <= MAX_BLOCK_TOKENS else _BLOCK_TOKENS
        info = {
            "model": self._model,
            "namespace": root_of(self._model).hex(),
            "block_tokens": str(block_tokens),
            "max_tokens": str(tokens),
            "kv_tokens": str(int(blocks.group(1)) * block_tokens if blocks is not None and size is not None else 0),
            ADAPTERS: _adapters_of(listed),
            **await self._events_of(place),
        }
        life_s = float(started.group(1)) if started is not None else time.time()
        return Member(role="decode", id=place.id, incarnation=max(1, int(life_s * 1000)), address=place.address, info=info)

    async def _events_of(self, place: EnginePlace) -> dict[str, str]:
        """Where it publishes, as we were told or as it says itself; nothing if it doesn't."""
        if place.events:
            return {KV_EVENTS: place.events, KV_REPLAY: place.replay, KV_TOPIC: place.topic}
        try:
            sources = _json(place, await self._get(place, "/kv_event_sources"))
        except DeadlineError:
            raise
        except KvpoolError:
            sources = {}  # engines before 0.24 don't know the question
        if not isinstance(sources, dict) or not all(isinstance(source, dict) for source in sources.values()):
            raise ProtocolError("what it says of its events can't be read")
        if len(sources) > 1:
            raise ConfigError("its ranks share one server; start a server for each (--data-parallel-external-lb) and name them all")
        for source in sources.values():
            endpoint, replay = source.get("endpoint"), source.get("replay_endpoint")
            if source.get("publisher") == "zmq" and isinstance(endpoint, str):
                topic = source.get("topic")
                found = {KV_EVENTS: place.reach(endpoint), KV_TOPIC: topic if isinstance(topic, str) else ""}
                return {**found, KV_REPLAY: place.reach(replay) if isinstance(replay, str) else ""}
        log.warning("the engine at %s publishes no events; what it holds is guessed from what it was sent", place.address)
        return {}

    async def _get(self, place: EnginePlace, path: str) -> bytes:
        return await ask(place, path, timeout_s=_ANSWER_S, context=self._context_of(place))

    def _context_of(self, place: EnginePlace) -> ssl.SSLContext | None:
        return self._context if place.tls else None

    def _show(self, place: EnginePlace, member: Member | None) -> None:
        """It is `member` now, or not there."""
        if member is None and self._there.pop(place.address, None) is None:
            return
        if member is not None:
            self._there[place.address] = member
        self._members = tuple(self._there[address] for address in self._places if address in self._there)
        for callback in list(self._callbacks):
            callback(self._members)


def _json(place: EnginePlace, data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"{place.address} answered something that is not JSON: {error}") from error


def _adapters_of(listed: Any) -> str:
    """The LoRA adapters among the models that are listed: those that have a parent. As a JSON array."""
    models = listed.get("data") if isinstance(listed, dict) else None
    names = {
        model["id"]
        for model in (models if isinstance(models, list) else ())
        if isinstance(model, dict) and isinstance(model.get("id"), str) and isinstance(model.get("parent"), str)
    }
    return msgspec.json.encode(sorted(names)[:MAX_ADAPTERS]).decode()


def _model_of(place: EnginePlace, listed: Any) -> tuple[str, int]:
    """What the engine calls the model to use, and how many tokens of prompt and answer it takes."""
    models = listed.get("data") if isinstance(listed, dict) else None
    for model in models if isinstance(models, list) else ():
        name, tokens = (model.get("id"), model.get("max_model_len")) if isinstance(model, dict) else (None, None)
        wanted = name == place.model if place.model else not (isinstance(model, dict) and model.get("parent"))
        if wanted and isinstance(name, str) and type(tokens) is int and tokens >= 1:
            return name, tokens
    raise ConfigError(f"it lists no model{f' called {place.model!r}' if place.model else ''} with a max_model_len")
