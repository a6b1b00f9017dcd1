"""The stream bench pairs each token with its arrival, whatever the pieces in which bytes come."""

import pytest

from bench.router_streams import _added
from bench.stream_clients import Stream
from bench.stream_workers import prompt_of, stream_of
from kvpool.errors import UnavailableError


def test_streams_are_named_by_their_prompts() -> None:
    """And back."""
    assert all(stream_of(tuple(prompt_of(stream))) == stream for stream in (0, 7, 99, 100, 9_999))


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_events_are_counted_wherever_pieces_end(size: int) -> None:
    """Every event once, the end mark is none; a refusal begins nothing but ends the waiting."""
    answer = b'HTTP/1.1 200 OK\r\n\r\ndata: {"a":1}\n\ndata: {"b":2}\n\ndata: [DONE]\n\n'
    stream = Stream(b"")
    for start in range(0, len(answer), size):
        stream.data_received(answer[start : start + size])
    assert (len(stream.events), stream.complete, stream.begun.is_set()) == (2, True, True)
    refused = Stream(b"")
    refused.data_received(b"HTTP/1.1 429 Too Many Requests\r\n")
    assert (refused.events, refused.begun.is_set(), refused.status) == ([], True, b"429")


def test_added_time_is_of_tokens_sent_while_all_streams_ran() -> None:
    """Tokens of a prefill (0) and those outside the common time don't count; too few are no measurement."""
    sent = {0: [0, *range(10**6, 201 * 10**6, 10**6)], 1: [0, *range(51 * 10**6, 301 * 10**6, 10**6)]}
    arrived = {stream: [at + 3 * 10**6 for at in times] for stream, times in sent.items()}
    found = _added(arrived, sent)
    assert (found["added_p50_ms"], found["added_p99_ms"], found["tokens"]) == (3.0, 3.0, 300)
    with pytest.raises(UnavailableError, match="more --seconds"):
        _added(arrived, {0: [0, 10**6], 1: [0, 10**6]})
