"""Three pool nodes and two copies of every block, nothing kept in workers: same answers, and a lost node costs not even a hit."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvpool.cli.chat import ChatClient
from kvpool.cli.conversation import DOCUMENT, Conversation
from kvpool.cli.procs import ClusterOptions
from kvpool.cli.supervisor import LocalCluster
from kvpool.request.pool import NodeDescription
from kvpool.units import MIB
from kvpool.wire.pool_client import PoolRpc

Truth = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
MAX_TOKENS = 8
SHARE = DOCUMENT.read_text()[:1200]


@pytest.fixture(scope="module")
def three() -> Iterator[LocalCluster]:
    options = ClusterOptions(port=0, nodes=3, copies=2, capacity_bytes=128 * MIB, resident_bytes=0, request_timeout_s=90)
    with LocalCluster(options) as running:
        running.wait_ready()
        yield running


async def _books(addresses: Sequence[str]) -> list[NodeDescription]:
    rpcs = [PoolRpc(address) for address in addresses]
    try:
        return [await rpc.describe(5) for rpc in rpcs]
    finally:
        for rpc in rpcs:
            await rpc.close()


def books_balance(cluster: LocalCluster) -> list[NodeDescription]:
    """Wait until no lease is left on any node; at every look `free + used + pinned == capacity`."""
    end = time.monotonic() + 60
    while True:
        books = asyncio.run(_books([member.address for member in cluster.membership.members("node")]))
        assert all(each.free_bytes + each.used_bytes + each.pinned_bytes == each.capacity_bytes for each in books)
        if not any(each.read_leases or each.write_leases or each.pinned_bytes for each in books):
            return books
        assert time.monotonic() < end, f"leases don't go back: {books}"
        time.sleep(0.05)


def asks(topic: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": f"{topic}: {SHARE}\n\nQuestion {n}: what is this about?"}] for n in range(3)]


def all_at_once(cluster: LocalCluster, questions: list[list[dict[str, str]]], amid: Callable[[], object]) -> list[list[int]]:
    """Ask them all together, do `amid` meanwhile, return the answers' tokens; each must come within its deadline."""
    chat = ChatClient(cluster.url, timeout_s=100)
    with ThreadPoolExecutor(len(questions)) as threads:
        replies = [threads.submit(chat.chat, ask, model="smollm2", max_tokens=MAX_TOKENS) for ask in questions]
        time.sleep(1.0)
        amid()
        return [list(reply.result(timeout=120).tokens) for reply in replies]


def expected(cluster: LocalCluster, truth: Truth, questions: list[list[dict[str, str]]]) -> list[list[int]]:
    chat = ChatClient(cluster.url)
    return truth([chat.prompt_tokens(ask) for ask in questions], MAX_TOKENS)


def test_conversation_is_exact_and_goes_on_from_the_cache_when_a_node_dies(three: LocalCluster, truth: Truth) -> None:
    """Two copies: after any node's death all that was seen before is still loaded, and every token is right."""
    talk = Conversation(three.url, DOCUMENT.read_text(), max_tokens=MAX_TOKENS)
    talk.ask("alice", "How many keepers live there?")
    talk.ask("bob", "What is the lens made of?")
    assert [each.blocks > 0 for each in books_balance(three)] == [True] * 3
    three.kill("node", 1)
    talk.ask("alice", "Are you sure?")
    assert [list(e.reply.tokens) for e in talk.exchanges] == truth([e.prompt for e in talk.exchanges], MAX_TOKENS)
    for exchange in talk.exchanges[1:]:
        sources = exchange.reply.extension["sources"]
        assert sources["resident"] == 0
        assert sources["pool"] >= 0.9 * exchange.shared_tokens
        pulled = exchange.reply.extension["decode_sources"]
        short = exchange.reply.extension["prefill_worker"] is None  # so little was missing that the decode worker computed it
        assert pulled == (sources if short else {"resident": 0, "pool": exchange.reply.prompt_tokens, "computed": 0})
    three.wait_ready()
    books_balance(three)


@pytest.mark.parametrize("index", range(3))
def test_node_that_dies_under_load_loses_no_answer(three: LocalCluster, truth: Truth, index: int) -> None:
    """Each in turn, while prompts are computed, stored and loaded."""
    questions = asks(f"Round {index}")
    wanted = expected(three, truth, questions)
    assert all_at_once(three, questions, lambda: three.kill("node", index)) == wanted
    assert all_at_once(three, questions, lambda: None) == wanted
    three.wait_ready()
    books_balance(three)


def test_node_that_freezes_under_load_loses_no_answer(three: LocalCluster, truth: Truth) -> None:
    """It answers nobody and closes nothing; requests go on with the other copies, and its leases go back when it wakes up."""
    questions = asks("A freeze")
    wanted = expected(three, truth, questions)
    assert all_at_once(three, questions, lambda: three.kill("node", 2, signal.SIGSTOP)) == wanted
    assert all_at_once(three, questions, lambda: None) == wanted
    three.kill("node", 2, signal.SIGCONT)
    three.wait_ready()
    books_balance(three)


@pytest.mark.parametrize("role", ["prefill", "decode", "membership"])
def test_other_processes_that_die_under_load_lose_no_answer(three: LocalCluster, truth: Truth, role: str) -> None:
    """Also with several nodes a worker is replaceable, and a lost membership server, with the cluster's config in it, isn't missed."""
    questions = asks(f"Without {role}")
    wanted = expected(three, truth, questions)
    assert all_at_once(three, questions, lambda: three.kill(role)) == wanted
    three.wait_ready()
    assert three.membership.config.copies == 2
    books_balance(three)
