"""A cluster of another shape: two pool nodes, everything over UCX, nothing kept in workers. Same answers."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from click.testing import CliRunner

from kvpool.cli.chat import ChatClient
from kvpool.cli.conversation import DOCUMENT, Conversation
from kvpool.cli.main import cli
from kvpool.cli.procs import ClusterOptions
from kvpool.cli.supervisor import LocalCluster
from kvpool.units import MIB

Truth = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[LocalCluster]:
    options = ClusterOptions(port=0, nodes=2, capacity_bytes=128 * MIB, transport="ucx", resident_bytes=0)
    with LocalCluster(options) as running:
        running.wait_ready()
        yield running


def test_conversation_over_two_nodes_by_ucx_is_exact_and_cached(two_nodes: LocalCluster, truth: Truth) -> None:
    """Extents on two nodes, pulled over TCP: at least 90 % of what was seen before is loaded, and every token is right."""
    talk = Conversation(two_nodes.url, DOCUMENT.read_text(), max_tokens=MAX_TOKENS)
    for client, question in (("alice", "How many keepers live there?"), ("bob", "What is the lens made of?"), ("alice", "Are you sure?")):
        talk.ask(client, question)
    assert [list(e.reply.tokens) for e in talk.exchanges] == truth([e.prompt for e in talk.exchanges], MAX_TOKENS)
    for exchange in talk.exchanges[1:]:
        sources = exchange.reply.extension["sources"]
        assert sources["resident"] == 0
        assert sources["pool"] >= 0.9 * exchange.shared_tokens
        pulled = exchange.reply.extension["decode_sources"]
        short = exchange.reply.extension["prefill_worker"] is None  # so little was missing that the decode worker computed it
        assert pulled == (sources if short else {"resident": 0, "pool": exchange.reply.prompt_tokens, "computed": 0})


def test_status_shows_the_reach_in_use(two_nodes: LocalCluster) -> None:
    """Operators see how bytes move, per worker and node."""
    ChatClient(two_nodes.url).chat([{"role": "user", "content": "Hello!"}], model="smollm2", max_tokens=2)
    shown = CliRunner().invoke(cli, ["status", "--json", "--cluster", two_nodes.cluster_url])
    assert shown.exit_code == 0, shown.output
    workers = json.loads(shown.output)["workers"]
    assert len(workers) == 2
    reaches = [reach for worker in workers for reach in worker["reaches"].values()]
    assert len(reaches) >= 2
    assert set(reaches) == {"ucx"}


def test_one_of_two_nodes_dies_under_load_and_no_answer_is_lost(two_nodes: LocalCluster, truth: Truth) -> None:
    """Over UCX a dead node is a broken connection in mid-transfer: its share is computed again, the other's is still loaded."""
    chat = ChatClient(two_nodes.url)
    document = DOCUMENT.read_text()[:2500]
    asks = [[{"role": "user", "content": f"{document}\n\nQuestion {n}: what is this about?"}] for n in range(4)]
    expected = truth([chat.prompt_tokens(ask) for ask in asks], MAX_TOKENS)
    with ThreadPoolExecutor(len(asks)) as threads:
        replies = [threads.submit(chat.chat, ask, model="smollm2", max_tokens=MAX_TOKENS) for ask in asks]
        time.sleep(1.5)
        two_nodes.kill("node", 0)
        assert [list(reply.result(timeout=120).tokens) for reply in replies] == expected
    two_nodes.wait_ready()
    again = [chat.chat(ask, model="smollm2", max_tokens=MAX_TOKENS) for ask in asks]
    assert [list(reply.tokens) for reply in again] == expected
    assert sum(reply.cached_tokens for reply in again) > 0
