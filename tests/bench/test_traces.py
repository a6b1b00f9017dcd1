"""Reading traces: each format, and what is none."""

import json
from pathlib import Path

import pytest

from bench.traces import STAGGER_S, Request, read_trace
from kvpool.errors import ConfigError
from kvpool.units import MS, SECOND


def mooncake(path: Path, *requests: tuple[int, int, list[int]]) -> str:
    lines = [json.dumps({"timestamp": at, "input_length": n, "output_length": 1, "hash_ids": ids}) for at, n, ids in requests]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def conversation(path: Path, *requests: tuple[float, int, list[int]], block_size: int = 64) -> str:
    fields = {"block_size": block_size, "requests": [{"t": t, "in": n, "out": 1, "hash_ids": ids} for t, n, ids in requests]}
    path.write_text(json.dumps(fields))
    return str(path)


def test_mooncake_lines_become_requests_in_order_of_time_with_dense_numbers(tmp_path: Path) -> None:
    """Replays keep blocks in arrays and walk time forward."""
    trace = read_trace(mooncake(tmp_path / "t.jsonl", (7, 1000, [50, 9]), (3, 1500, [50, 8, 77])))
    assert trace.requests == (Request(3 * MS, 1500, (0, 1, 2)), Request(7 * MS, 1000, (0, 3)))
    assert (trace.name, trace.block_tokens, trace.unique, trace.tokens, trace.references) == ("t", 512, 4, 2500, 5)


def test_block_named_twice_in_a_prompt_counts_once(tmp_path: Path) -> None:
    """A store holds one copy; inserting it twice would be an error of the replay's."""
    assert read_trace(mooncake(tmp_path / "t.jsonl", (0, 1500, [4, 5, 4]))).requests[0].blocks == (0, 1)


def test_conversations_of_a_folder_don_t_share_ids_and_start_one_after_another(tmp_path: Path) -> None:
    """Their ids are local: equal numbers are different blocks."""
    conversation(tmp_path / "a.json", (0.0, 100, [1, 2]), (500.5, 130, [1, 2, 3]))
    conversation(tmp_path / "b.json", (0.0, 60, [1]))
    trace = read_trace(str(tmp_path))
    assert trace.requests == (
        Request(0, 100, (0, 1)),
        Request(STAGGER_S * SECOND, 60, (2,)),
        Request(500 * SECOND + 500 * MS, 130, (0, 1, 3)),
    )
    assert trace.block_tokens == 64


def test_one_conversation_file_is_a_trace_too(tmp_path: Path) -> None:
    """Looking at one conversation alone is how one understands it."""
    assert read_trace(conversation(tmp_path / "a.json", (1.0, 100, [1, 2]))).requests == (Request(SECOND, 100, (0, 1)),)


def test_synthetic_trace_depends_on_its_seed_only() -> None:
    """A figure measured on it must be measurable again."""
    once, again, other = read_trace("synthetic:3"), read_trace("synthetic:3"), read_trace("synthetic:4")
    assert once == again != other
    assert all(len(request.blocks) == -(-request.tokens // 512) for request in once.requests)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a conversation"),
        ("TIMESTAMP,ContextTokens\n1,2\n", "not a conversation"),
        ('{"requests": []}', "not a conversation"),
        ('{"block_size": 64, "requests": []}', "has no request"),
        ('{"timestamp": 0, "hash_ids": [1], "input_length": 5}\n{"timestamp": 0}\n', "t:2: not a Mooncake request"),
        ('{"timestamp": "x", "hash_ids": [1], "input_length": 5}\n', "t:1: not a Mooncake request"),
    ],
)
def test_unknown_format_is_refused_naming_what_is_expected(tmp_path: Path, text: str, message: str) -> None:
    """A trace misread would give figures that look right."""
    (tmp_path / "t").write_text(text)
    with pytest.raises(ConfigError, match=f"{message}.*expected Mooncake JSONL"):
        read_trace(str(tmp_path / "t"))


def test_absent_and_mixed_traces_are_refused(tmp_path: Path) -> None:
    """Every way to name the wrong thing gets a message that says what to do."""
    with pytest.raises(ConfigError, match="can't read"):
        read_trace(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"holds no \*.json"):
        read_trace(str(tmp_path))
    with pytest.raises(ConfigError, match="synthetic:7"):
        read_trace("synthetic:x")
    conversation(tmp_path / "a.json", (0.0, 100, [1, 2]))
    conversation(tmp_path / "b.json", (0.0, 100, [1]), block_size=128)
    with pytest.raises(ConfigError, match="mixes block sizes"):
        read_trace(str(tmp_path))
