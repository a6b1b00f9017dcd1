"""`KvpoolConnector` in vLLM itself: what another server computed is taken from the pool, token-exact, whatever becomes of the pool."""

import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from kvpool.testing.killing_relay import KillingRelay
from kvpool.testing.node_process import NodeProcess, poll
from kvpool.testing.stock_process import VllmServer, free_ports
from router.feeds.vllm_wire import BlocksStored, read_batch

HITS = "vllm:external_prefix_cache_hits"
SAVED = "vllm:kvpool_save_blocks"
MIB = 1 << 20


def transfer(pool: str, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """The flag."""
    return {
        "kv_connector": "KvpoolConnector",
        "kv_connector_module_path": "kvpool.connectors.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"pool": pool, **extra},
    }


def prompt_of(seed: int, tokens: int = 1000) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 48_000) for _ in range(tokens)]


def answer(server: VllmServer, prompt: list[int], max_tokens: int = 8, **parameters: Any) -> tuple[list[int], float]:
    """Greedy token ids, and the logprob of the first."""
    body = {"model": "served", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    said = json.loads(server.ask("/v1/completions", {**body, "return_token_ids": True, **parameters}))["choices"][0]
    return said["token_ids"], said["logprobs"]["token_logprobs"][0]


def count(server: VllmServer, name: str) -> float:
    return server.counters().get(name, 0.0)


def hear_events() -> tuple[str, str]:
    """Where an engine will publish its KV events, and the flag that makes it do so."""
    (port,) = free_ports(1)
    return f"tcp://127.0.0.1:{port}", json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"})


def heard(ear: "zmq.Socket[bytes]", blocks: int) -> tuple[list[bytes], list[bytes]]:
    """The hashes of the first blocks that are told of: in the engine's own memory, and in storage."""
    told: dict[bool, list[bytes]] = {False: [], True: []}
    until = time.monotonic() + 30
    while min(map(len, told.values())) < blocks:
        assert ear.poll(max(0, int((until - time.monotonic()) * 1000))), f"only {told} was told of within 30 s"
        for event in read_batch(ear.recv_multipart()[-1]).events:
            if isinstance(event, BlocksStored):
                told[event.medium == "STORAGE"] += event.hashes
    return told[False], told[True]


@pytest.mark.timeout(900)
def test_cold_server_takes_the_prompt_from_the_pool(vllm_server: Callable[..., VllmServer], pool_node: Callable[..., NodeProcess]) -> None:
    """At least 85 % of 1,000 tokens, by vLLM's own counter; the same tokens and first logprob; also when the pool was away and is back."""
    node, (endpoint, events) = pool_node("--capacity", "512MiB"), hear_events()
    first = vllm_server(transfer=transfer(node.address), core=0, flags=["--kv-events-config", events])
    other = vllm_server(transfer=transfer(node.address), core=1)
    prompt = prompt_of(1)
    with zmq.Context() as context, context.socket(zmq.SUB) as ear:
        ear.connect(endpoint)
        ear.subscribe("")
        time.sleep(0.5)  # a subscription takes a moment; what was published before is not sent again
        computed = answer(first, prompt)
        poll(lambda: count(first, SAVED) >= 7, "the first server saves its blocks")
        in_engine, in_pool = heard(ear, 7)
    assert in_pool == in_engine, "the pool's events name the blocks as the engine's own do"
    taken = answer(other, prompt)
    assert count(other, HITS) >= 850
    assert taken[0] == computed[0]
    assert taken[1] == pytest.approx(computed[1], abs=1e-6)
    assert count(other, "vllm:kvpool_load_failed_blocks") == 0

    node.kill()
    away = prompt_of(2)
    assert answer(other, away) == answer(first, away)
    assert count(other, HITS) < 1000
    back = pool_node("--capacity", "512MiB", "--listen", node.address)
    assert back.address == node.address
    number = 3
    while count(other, HITS) < 1000:  # until both have noticed
        assert number < 60, "the servers don't use the pool that is back"
        prompt, number = prompt_of(number), number + 1
        assert answer(first, prompt, 1)[0] == answer(other, prompt, 1)[0]
        time.sleep(0.5)

    other.stop()
    small = vllm_server(transfer=transfer(node.address), core=1, flags=["--block-size", "64"])
    assert answer(small, prompt)[0] == answer(first, prompt)[0]
    assert count(small, HITS) == 0, "blocks of another size are others"


@pytest.mark.timeout(900)
def test_decode_goes_on_where_prefill_ended(vllm_server: Callable[..., VllmServer], pool_node: Callable[..., NodeProcess]) -> None:
    """Prefill on one server, decode on the other: token-exact, found at once when the prefill has answered; the hand-off is printed."""
    node = pool_node("--capacity", "512MiB")
    prefill = vllm_server(transfer=transfer(node.address, "kv_producer"), core=0)
    decode = vllm_server(transfer=transfer(node.address, "kv_consumer"), core=1)
    answer(prefill, prompt_of(99, 200), 1)
    answer(decode, prompt_of(98, 200), 1)
    hits, times = 0.0, []
    for seed in range(3):
        prompt = prompt_of(seed + 20, 1024 + 20)
        (first, *_), _ = answer(prefill, prompt, 1)
        began = time.monotonic()
        tokens, _ = answer(decode, prompt, 1)
        times.append(time.monotonic() - began)
        rest, _ = answer(decode, prompt, 8)
        hits += 1024
        assert count(decode, HITS) == hits, "all whole blocks of the prompt were there at once"
        assert tokens == [first]
        assert rest[0] == first
        alone, _ = answer(prefill, prompt, 8)
        assert rest == alone
    print(f"\nhand-off of 1,024 tokens, prefill's answer to decode's first token: {[round(1e3 * one) for one in times]} ms")


@pytest.mark.parametrize("load", ["async", "sync"])
@pytest.mark.timeout(900)
def test_pool_killed_amid_a_load_costs_time_only(
    load: str, vllm_server: Callable[..., VllmServer], pool_node: Callable[..., NodeProcess]
) -> None:
    """The node dies when 6 MiB of 20 have come: the rest is computed, the answer is the same, and the server goes on."""
    node = pool_node("--capacity", "256MiB")
    with KillingRelay(node.address, node.kill) as relay:
        server = vllm_server(transfer=transfer(relay.address, transport="grpc", load=load))
        prompt = prompt_of(5)
        computed = answer(server, prompt)
        poll(lambda: count(server, SAVED) >= 7, "the server saves its blocks")
        server.forget()
        relay.arm(6 * MIB)
        taken = answer(server, prompt)
        assert relay.killed.is_set()
        assert taken[0] == computed[0]
        failed = count(server, "vllm:kvpool_load_failed_blocks")
        assert 0 < failed <= 7
        assert answer(server, prompt_of(6))[0] == answer(server, prompt_of(6))[0]
