"""Traces of four kinds become one form; a bad line is named by its number; made-up prompts share what the trace shares."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import ConfigError
from kvpool.replay.traces import FORMATS, Prompts, Trace, TraceRequest, read_trace
from kvpool.replay.traces.own import spell, spell_header

SHARED = Path(__file__).parents[3] / "shared" / "traces"
MOONCAKE = {"timestamp": 100, "input_length": 1030, "output_length": 5, "hash_ids": [7, 8, 9]}
BAILIAN = {
    "chat_id": 9,
    "parent_chat_id": -1,
    "timestamp": 1.5,
    "input_length": 40,
    "output_length": 5,
    "type": "text",
    "turn": 1,
    "hash_ids": [3, 4, 5],
}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
OWN = {"at_ms": 2.5, "input": 33, "output": 4, "blocks": ["a1", "b2", "c3"], "session": "s", "tenant": "t", "outcome": "ok"}


def _written(tmp_path: Path, *lines: Any, name: str = "trace.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def _blocks(trace: Trace) -> list[tuple[int, ...]]:
    return [request.blocks for request in trace.requests]


def test_mooncake_is_read_in_order_of_time(tmp_path: Path) -> None:
    """Milliseconds from the first arrival, blocks of 512 numbered from 0."""
    later = {**MOONCAKE, "timestamp": 2100, "hash_ids": [7, 8, 10], "session_id": 5}
    trace = read_trace(_written(tmp_path, later, "", MOONCAKE))
    assert (trace.format, trace.block_tokens, trace.unique, trace.name) == ("mooncake", 512, 4, "trace")
    assert [(r.at_ns, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [(0, 1030, 5), (2_000_000_000, 1030, 5)]
    assert _blocks(trace) == [(0, 1, 2), (0, 1, 3)]
    assert trace.requests[1].session == "5"
    assert (trace.seconds, trace.prompt_tokens, trace.shared_tokens) == (2.0, 2060, 1024)


def test_bailian_sessions_are_followed_to_their_first_chat(tmp_path: Path) -> None:
    """Seconds, blocks of 16 that are hashed one by one: an equal id behind another beginning is another block."""
    second = {**BAILIAN, "chat_id": 10, "parent_chat_id": 9, "timestamp": 3.25, "turn": 2}
    third = {**BAILIAN, "chat_id": 11, "parent_chat_id": 10, "timestamp": 4.0, "turn": 3, "hash_ids": [9, 4, 5], "type": "search"}
    orphan = {**BAILIAN, "chat_id": 12, "parent_chat_id": 2, "timestamp": 5.0, "hash_ids": [3]}
    trace = read_trace(_written(tmp_path, BAILIAN, second, third, orphan))
    assert (trace.format, trace.block_tokens) == ("qwen-bailian", 16)
    assert _blocks(trace) == [(0, 1, 2), (0, 1, 2), (3, 4, 5), (0,)]
    named = [(r.session, r.turn, r.kind) for r in trace.requests]
    assert named == [("9", 1, "text"), ("9", 2, "text"), ("9", 3, "search"), ("2", 1, "text")]
    assert trace.requests[1].at_ns == 1_750_000_000


def test_azure_knows_lengths_only(tmp_path: Path) -> None:
    """Both years' spelling of time; Windows line ends; no blocks."""
    lines = (AZURE + "\r", "2023-11-16 23:59:59.9799600,4808,10\r", "2023-11-17 00:00:00.0319600,3180,8\r")
    trace = read_trace(_written(tmp_path, *lines, name="azure.csv"))
    assert (trace.format, trace.block_tokens, trace.unique) == ("azure", 0, 0)
    assert trace.requests == (TraceRequest(0, 4808, 10), TraceRequest(52_000_000, 3180, 8))
    zoned = read_trace(_written(tmp_path, AZURE, "2024-05-10 00:00:00.009930+00:00,1,0", "2024-05-10 00:00:01+00:00,2,1"))
    assert zoned.requests[1].at_ns == 990_070_000


def test_own_recording_says_what_was_lost(tmp_path: Path) -> None:
    """The first line says how long a block is; lines of the recorder about itself are not requests."""
    path = _written(tmp_path, spell_header(16, "m"), spell(OWN), spell({"lost": 3}), "", spell({**OWN, "at_ms": 4.5, "blocks": ["a1"]}))
    trace = read_trace(path)
    assert (trace.format, trace.block_tokens, trace.lost) == ("kvpool", 16, 3)
    assert trace.requests[0] == TraceRequest(0, 33, 4, (0, 1, 2), "s", 0, "t")
    assert (trace.requests[1].at_ns, trace.requests[1].blocks) == (2_000_000, (0,))


def test_reading_may_stop_early(tmp_path: Path) -> None:
    """A long trace is not read to its end for its first requests, nor is what is wrong behind them."""
    assert len(read_trace(_written(tmp_path, MOONCAKE, MOONCAKE, "nonsense"), limit=2).requests) == 2


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((MOONCAKE, "nonsense"), ":2: not JSON"),
        ((MOONCAKE, "", "[1]"), ":3: not a JSON object"),
        ((MOONCAKE, {**MOONCAKE, "input_length": 0}), ":2: input_length"),
        ((MOONCAKE, {**MOONCAKE, "output_length": -1}), ":2: output_length"),
        ((MOONCAKE, {**MOONCAKE, "output_length": True}), ":2: output_length"),
        ((MOONCAKE, {**MOONCAKE, "timestamp": "now"}), ":2: timestamp"),
        ((MOONCAKE, {**MOONCAKE, "hash_ids": 5}), ":2: hash_ids"),
        ((MOONCAKE, {**MOONCAKE, "hash_ids": [1.5]}), ":2: hash_ids"),
        ((MOONCAKE, {**MOONCAKE, "hash_ids": [1] * 4}), ":2: hash_ids has 4 blocks, but 1030 tokens fill 3 of 512"),
        ((BAILIAN, {**BAILIAN, "chat_id": "x"}), ":2: chat_id"),
        ((AZURE, "2023-11-16 18:17:03,4808"), ":2: 2 columns"),
        ((AZURE, "yesterday,4808,10"), ":2: TIMESTAMP"),
        ((AZURE, "2023-13-16 18:17:03,4808,10"), ":2: TIMESTAMP"),
        ((AZURE, "2023-11-16 18:17:03,many,10"), ":2: ContextTokens"),
        ((spell_header(16, "m"), spell_header(16, "m")), ":2: a second first line"),
        (('{"kvpool_trace": 9, "block_tokens": 16}',), ":1: version 9"),
        (('{"kvpool_trace": 1, "block_tokens": 0}',), ":1: block_tokens"),
        (('{"a": 1}',), "no known trace; known are"),
        (("",), "the file is empty"),
        ((AZURE,), "has no requests"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, lines: tuple[Any, ...], words: str) -> None:
    """Somebody has to find it among a million."""
    with pytest.raises(ConfigError) as caught:
        read_trace(_written(tmp_path, *lines))
    assert words in str(caught.value)


def test_file_that_is_no_text_or_not_there_is_refused(tmp_path: Path) -> None:
    """With its name."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00" * 10)
    for name in ("binary", "absent"):
        with pytest.raises(ConfigError, match=name):
            read_trace(tmp_path / name)


_ANYTHING = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=3))


@given(st.sampled_from([MOONCAKE, BAILIAN, OWN]), st.data())
def test_damaged_lines_never_end_in_another_error(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any], data: st.DataObject
) -> None:
    """Whatever a field holds: a request, or a ConfigError that names the line."""
    damaged = {**fields, data.draw(st.sampled_from(sorted(fields))): data.draw(_ANYTHING)}
    head = [spell_header(16, "m")] if fields is OWN else []
    path = _written(tmp_path_factory.mktemp("damaged"), *head, fields, damaged)
    told = _told(path)
    assert told == "2 requests" or f"{path}:{len(head) + 2}: " in told


def _told(path: Path) -> str:
    """What reading comes to, in words."""
    try:
        return f"{len(read_trace(path).requests)} requests"
    except ConfigError as error:
        return str(error)


def test_every_format_has_a_name() -> None:
    """As the documentation lists them."""
    assert FORMATS == ("kvpool", "mooncake", "qwen-bailian", "azure")
    docs = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()
    assert all(f"| {name} |" in docs for name in FORMATS)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not here")
def test_public_traces_are_read_whole() -> None:
    """As many requests as lines; the conversation trace shares what its authors say (about 40 % of its tokens)."""
    trace = read_trace(SHARED / "mooncake" / "conversation_trace.jsonl")
    assert (len(trace.requests), trace.unique) == (12_031, 182_790)
    assert 0.35 < trace.shared_tokens / trace.prompt_tokens < 0.42
    assert len(read_trace(SHARED / "azure" / "AzureLLMInferenceTrace_code.csv").requests) == 8_819


def _common(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_prompts_share_what_the_trace_shares() -> None:
    """Exactly the blocks before the first that differs, at the trace's own size and at another; without blocks nothing but by chance."""
    requests = [
        TraceRequest(0, 70, 10, (0, 1, 2, 3, 4)),
        TraceRequest(0, 64, 10, (0, 1, 5, 6)),
        TraceRequest(0, 40, 10),
        TraceRequest(0, 40, 10),
    ]
    for size in (16, 4):
        prompts = Prompts(range(100, 150), block_tokens=16, size=size)
        made = [prompts.prompt(index, request) for index, request in enumerate(requests)]
        assert [len(prompt) for prompt in made] == [max(1, round(r.prompt_tokens * size / 16)) for r in requests]
        assert _common(made[0], made[1]) == 2 * size
        assert _common(made[0], made[2]) == _common(made[2], made[3]) == 0
        assert all(100 <= token < 150 for prompt in made for token in prompt)
        assert made == [prompts.prompt(index, request) for index, request in enumerate(requests)]
    assert prompts.output_tokens(requests[0]) == 2


def test_partial_last_block_is_a_prefix_of_nothing_else() -> None:
    """A prompt that ends within a block has its own last block in the trace, and so here."""
    prompts = Prompts(range(50), block_tokens=16)
    short, long = prompts.prompt(0, TraceRequest(0, 20, 1, (0, 1))), prompts.prompt(1, TraceRequest(0, 32, 1, (0, 2)))
    assert _common(short, long) == 16
