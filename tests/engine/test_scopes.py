"""Tenants in one engine: same tokens, other keys, so nothing of one serves another."""

import asyncio
from dataclasses import replace
from typing import Any

from kvpool.block import salted_root
from kvpool.engine.engine import Engine
from kvpool.engine.model import Model
from kvpool.engine.store import MemoryStore
from kvpool.request import PrefillRequest, Scope
from tests.engine.conftest import EngineMaker, prompt_of

ALICE, BOB = Scope(salt=b"a" * 32, tenant="alice"), Scope(salt=b"b" * 32, tenant="bob")


async def sources(engine: Engine, scope: Scope) -> tuple[int, int]:
    """(resident, pool) tokens of a prefill of one and the same prompt."""
    request = PrefillRequest(request_id="r", prompt=prompt_of(40), scope=scope)
    events: Any = [event async for event in engine.prefill(request)]
    async with asyncio.timeout(20):
        while engine.status(role="prefill", model="m").active_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.001)  # its KV is left to later requests when it has retired
    return events[0].sources.resident, events[0].sources.pool


async def test_equal_prompts_of_two_tenants_share_nothing(engine_of: EngineMaker, model: Model) -> None:
    """Neither in the pool nor in the worker's own memory; each finds its own again."""
    store = MemoryStore(model.geometry.bytes_per_token)
    async with engine_of(store) as engine:
        assert await sources(engine, ALICE) == (0, 0)
        assert await sources(engine, BOB) == (0, 0)
        assert await sources(engine, Scope()) == (0, 0)
        assert await sources(engine, ALICE) == (0, 39)
    async with engine_of(MemoryStore(model.geometry.bytes_per_token), resident_bytes=1 << 20) as engine:
        assert await sources(engine, ALICE) == (0, 0)
        assert await sources(engine, BOB) == (0, 0)
        assert (await sources(engine, BOB))[0] > 0


def test_router_finds_the_root_from_what_a_worker_publishes(model: Model) -> None:
    """Canonical bytes without a salt, and the salt."""
    canonical = model.namespace.canonical()
    assert salted_root(canonical, b"") == model.namespace.root()
    assert salted_root(canonical, b"s" * 32) == replace(model.namespace, salt=b"s" * 32).root()


def test_salt_does_not_show(model: Model) -> None:
    """A request may be logged."""
    assert "aaaa" not in repr(PrefillRequest(request_id="r", prompt=(1,), scope=ALICE))
