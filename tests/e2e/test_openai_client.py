"""The official `openai` client against the whole cluster."""

import asyncio
import http.client
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import openai
import pytest

from kvpool.cli.chat import ChatClient
from kvpool.cli.http import call
from kvpool.cli.supervisor import LocalCluster
from kvpool.request.pool import NodeDescription
from kvpool.wire.worker_client import WorkerClient

Truth = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
Balanced = Callable[[], NodeDescription]

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def test_chat_answers_and_counts_tokens(client: openai.OpenAI, cluster: LocalCluster, truth: Truth) -> None:
    """A chat completion is what the model says, and usage adds up."""
    answer = client.chat.completions.create(model="smollm2", messages=FRANCE, max_tokens=16, temperature=0)  # type: ignore[arg-type]
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    prompt = ChatClient(cluster.url).prompt_tokens(FRANCE)
    (expected,) = truth([prompt], 16)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(expected)
    assert answer.usage.total_tokens == len(prompt) + len(expected)
    assert answer.usage.prompt_tokens_details is not None


def test_stream_equals_the_whole_answer(client: openai.OpenAI) -> None:
    """Streaming changes how text arrives, not what it is."""
    ask = {"model": "smollm2", "messages": FRANCE, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**ask)  # type: ignore[call-overload]
    stream = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_completions_stream_and_not(client: openai.OpenAI) -> None:
    """The older endpoint works the same way, with stop strings."""
    ask = {"model": "smollm2", "prompt": "One, two, three, four,", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**ask)  # type: ignore[call-overload]
    streamed = "".join(c.choices[0].text for c in client.completions.create(**ask, stream=True))  # type: ignore[call-overload]
    assert streamed == whole.choices[0].text
    assert "five" in streamed
    stopped = client.completions.create(**ask, stop=["five"])  # type: ignore[call-overload]
    assert stopped.choices[0].text == whole.choices[0].text.split("five")[0]
    assert stopped.choices[0].finish_reason == "stop"


def test_seeded_sampling_repeats_and_seeds_differ(client: openai.OpenAI) -> None:
    """The same seed gives the same text wherever it is served; other seeds give other texts."""
    ask = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.0, "top_p": 0.95}
    texts = [client.completions.create(**ask, seed=seed).choices[0].text for seed in (1, 1, 2, 3)]  # type: ignore[call-overload]
    assert texts[0] == texts[1]
    assert len(set(texts[1:])) > 1


def test_models_lists_the_served_model(client: openai.OpenAI) -> None:
    """Clients discover what is served."""
    assert [model.id for model in client.models.list()] == ["smollm2"]


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"model": "gpt-9"}, 404, "gpt-9"),
        ({"messages": []}, 400, "messages"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"messages": [{"role": "user", "content": "x " * 9000}]}, 400, "context"),
        ({"temperature": 9}, 400, "temperature"),
        ({"n": 0}, 400, "n"),
    ],
)
def test_bad_requests_get_an_openai_error(client: openai.OpenAI, changes: dict[str, object], status: int, words: str) -> None:
    """Mistakes are told in the shape the client knows, with the right status."""
    ask = {"model": "smollm2", "messages": FRANCE, "max_tokens": 4, **changes}
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**ask)  # type: ignore[call-overload]
    assert caught.value.status_code == status
    assert words in str(caught.value)


def test_malformed_json_gets_an_openai_error(cluster: LocalCluster) -> None:
    """A body that is not JSON is a 400, not a 500."""
    parts = urlsplit(cluster.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    connection.request("POST", "/v1/chat/completions", b'{"model": ', {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 400
    assert set(json.loads(response.read())["error"]) == {"message", "type", "param", "code"}
    connection.close()


def test_thirty_two_requests_at_once_are_all_right(
    client: openai.OpenAI, cluster: LocalCluster, truth: Truth, books_balance: Balanced
) -> None:
    """Concurrency changes no answer, and nothing is left leased."""
    chat = ChatClient(cluster.url)
    asks = [[{"role": "user", "content": f"Write the number {n} and then stop."}] for n in range(32)]
    with ThreadPoolExecutor(32) as threads:
        replies = list(threads.map(lambda ask: chat.chat(ask, model="smollm2", max_tokens=8), asks))
    expected = truth([chat.prompt_tokens(ask) for ask in asks], 8)
    assert [list(reply.tokens) for reply in replies] == expected
    books_balance()


def test_hang_up_stops_the_work_and_gives_leases_back(cluster: LocalCluster, books_balance: Balanced) -> None:
    """A caller that goes away mid-stream frees its worker at once."""
    parts = urlsplit(cluster.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    body = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    _wait_for_active(cluster, 1, "the decode never started")
    response.close()
    connection.close()
    _wait_for_active(cluster, 0, "the worker still generates for a caller that has gone")
    books_balance()


def test_metrics_and_health_are_served(cluster: LocalCluster, client: openai.OpenAI) -> None:
    """What operators watch is there and moves."""
    client.chat.completions.create(model="smollm2", messages=FRANCE, max_tokens=2)  # type: ignore[arg-type]
    assert call(f"{cluster.url}/health", timeout_s=10)["status"] == "ok"
    parts = urlsplit(cluster.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    counted = [line for line in text.splitlines() if line.startswith("kvpool_") and "requests_total" in line and 'outcome="ok"' in line]
    assert counted
    assert float(counted[0].rsplit(" ", 1)[1]) >= 1


def _wait_for_active(cluster: LocalCluster, count: int, otherwise: str) -> None:
    """Poll until the decode worker works on `count` requests."""
    end = time.monotonic() + 60
    while asyncio.run(_active(cluster)) != count:
        assert time.monotonic() < end, otherwise
        time.sleep(0.05)


async def _active(cluster: LocalCluster) -> int:
    (member,) = cluster.membership.members("decode")
    worker = WorkerClient(member.address)
    try:
        return (await worker.status(10)).active_requests
    finally:
        await worker.close()
