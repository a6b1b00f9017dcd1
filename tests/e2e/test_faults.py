"""`kill -9` of each kind of process under load: every answer is right, the cluster heals by itself, nothing leaks."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from kvpool.cli.chat import ChatClient, Reply
from kvpool.cli.supervisor import LocalCluster
from kvpool.request.pool import NodeDescription

Truth = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
Balanced = Callable[[], NodeDescription]

CLIENTS = 6
MAX_TOKENS = 24
STORY = (
    "A fox lived at the edge of a wood. Every evening it came down to the river to drink, and every evening it met the same old heron, "
    "who stood in the shallows on one leg and did not like to be disturbed. "
)
ASKS = [[{"role": "user", "content": f"{STORY * 2} Tell me what happened on day {day}."}] for day in range(CLIENTS)]


class Load:
    """Clients that ask one question each, all at once."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._chat = ChatClient(cluster.url, timeout_s=100)
        self._threads = ThreadPoolExecutor(CLIENTS)
        self._begun = threading.Barrier(CLIENTS + 1, timeout=30)
        self._answers: list[Future[Reply]] = [self._threads.submit(self._ask, ask) for ask in ASKS]
        self._begun.wait()

    def _ask(self, ask: list[dict[str, str]]) -> Reply:
        self._begun.wait()
        return self._chat.chat(ask, model="smollm2", max_tokens=MAX_TOKENS)

    def finish(self) -> list[Reply]:
        """All answers; each must come within its deadline."""
        replies = [answer.result(timeout=120) for answer in self._answers]
        self._threads.shutdown()
        return replies


@pytest.fixture(scope="module")
def expected(cluster: LocalCluster, truth: Truth) -> list[list[int]]:
    chat = ChatClient(cluster.url)
    return truth([chat.prompt_tokens(ask) for ask in ASKS], MAX_TOKENS)


@pytest.mark.parametrize("delay_s", [0.3, 2.0])
@pytest.mark.parametrize("role", ["decode", "prefill", "node"])
def test_kill_under_load_loses_no_answer(
    cluster: LocalCluster, expected: list[list[int]], books_balance: Balanced, role: str, delay_s: float
) -> None:
    """Early (while prompts are computed) and later (while tokens stream), the death of a process costs time, never an answer."""
    (before,) = cluster.pids(role)
    load = Load(cluster)
    time.sleep(delay_s)
    cluster.kill(role)
    replies = load.finish()
    assert [list(reply.tokens) for reply in replies] == expected
    end = time.monotonic() + 60
    while cluster.pids(role) in ([], [before]):
        assert time.monotonic() < end, f"{role} was not restarted"
        time.sleep(0.05)
    cluster.wait_ready()
    again = Load(cluster).finish()
    assert [list(reply.tokens) for reply in again] == expected
    books_balance()


def test_cache_works_again_after_a_node_was_lost(cluster: LocalCluster, books_balance: Balanced) -> None:
    """A restarted node starts empty and fills by itself: what is asked next is stored, and found by who has not seen it."""
    before = books_balance()
    cluster.kill("node")
    empty = books_balance()
    assert empty.incarnation > before.incarnation
    assert empty.blocks == 0
    chat = ChatClient(cluster.url)
    ask = [{"role": "user", "content": f"{STORY * 8} What did the heron say?"}]
    reply = chat.chat(ask, model="smollm2", max_tokens=2)
    assert books_balance().blocks >= reply.prompt_tokens // 16
    cluster.kill("prefill")  # its successor holds nothing: the prefix can only come from the pool
    cluster.wait_ready()
    end = time.monotonic() + 60
    while True:
        question = {"role": "user", "content": f"Why, after {time.monotonic()} s? {STORY * 4}"}  # too long to skip the prefill
        answer = chat.chat([*ask, {"role": "assistant", "content": reply.text}, question], model="smollm2", max_tokens=2).extension
        if answer["prefill_worker"] is not None:
            break
        assert time.monotonic() < end, "the router does not find the new prefill worker"
    assert answer["sources"]["resident"] == 0
    assert answer["sources"]["pool"] >= reply.prompt_tokens - 16
