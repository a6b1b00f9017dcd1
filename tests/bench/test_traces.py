"""Reading traces: the kinds that benches add to those of the product, and what is none."""

import json
from pathlib import Path

import pytest

from bench.traces import STAGGER_S, read_trace
from kvpool.errors import ConfigError
from kvpool.replay.traces import TraceRequest
from kvpool.replay.traces import read_trace as read_file
from kvpool.units import MS, SECOND


def conversation(path: Path, *requests: tuple[float, int, list[int]], block_size: int = 64) -> str:
    fields = {"block_size": block_size, "requests": [{"t": t, "in": n, "out": 1, "hash_ids": ids} for t, n, ids in requests]}
    path.write_text(json.dumps(fields))
    return str(path)


def test_trace_of_the_product_is_read_by_the_product(tmp_path: Path) -> None:
    """Benches and `kvpool replay` must mean the same by a file."""
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps({"timestamp": 7, "input_length": 1000, "output_length": 1, "hash_ids": [50, 9]}))
    assert read_trace(str(path)) == read_file(path)


def test_conversations_of_a_folder_don_t_share_ids_and_start_one_after_another(tmp_path: Path) -> None:
    """Their ids are local: equal numbers are different blocks."""
    conversation(tmp_path / "a.json", (0.0, 100, [1, 2]), (500.5, 130, [1, 2, 3]))
    conversation(tmp_path / "b.json", (0.0, 60, [1]))
    trace = read_trace(str(tmp_path))
    assert trace.requests == (
        TraceRequest(0, 100, 1, (0, 1), "0"),
        TraceRequest(STAGGER_S * SECOND, 60, 1, (2,), "1"),
        TraceRequest(500 * SECOND + 500 * MS, 130, 1, (0, 1, 3), "0"),
    )
    assert (trace.name, trace.block_tokens) == (tmp_path.name, 64)


def test_one_conversation_file_is_a_trace_too(tmp_path: Path) -> None:
    """Looking at one conversation alone is how one understands it."""
    trace = read_trace(conversation(tmp_path / "a.json", (1.0, 100, [1, 2])))
    assert (trace.name, trace.requests) == ("a", (TraceRequest(0, 100, 1, (0, 1), "0"),))


def test_synthetic_trace_depends_on_its_seed_only() -> None:
    """A figure measured on it must be measurable again."""
    once, again, other = read_trace("synthetic:3"), read_trace("synthetic:3"), read_trace("synthetic:4")
    assert once == again != other
    assert all(len(request.blocks) == -(-request.prompt_tokens // 512) for request in once.requests)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.json", "", "not a coding conversation"),
        ("t.json", '{"requests": []}', "not a coding conversation"),
        ("t.json", '{"block_size": 64, "requests": []}', "has no requests"),
        ("t.json", '{"block_size": 64, "requests": [{"t": 0, "in": 5, "out": 1, "hash_ids": []}]}', "names no blocks"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5,1\n", "names no blocks"),
        ("t.csv", "a,b\n1,2\n", "no known trace"),
    ],
)
def test_trace_that_can_t_be_replayed_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    """A trace misread would give figures that look right."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(str(tmp_path / name))


def test_absent_and_mixed_traces_are_refused(tmp_path: Path) -> None:
    """Every way to name the wrong thing gets a message that says what to do."""
    for name in ("nothing", "nothing.json"):
        with pytest.raises(ConfigError, match="can't read trace"):
            read_trace(str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"holds no \*.json"):
        read_trace(str(tmp_path))
    with pytest.raises(ConfigError, match="synthetic:7"):
        read_trace("synthetic:x")
    conversation(tmp_path / "a.json", (0.0, 100, [1, 2]))
    conversation(tmp_path / "b.json", (0.0, 100, [1]), block_size=128)
    with pytest.raises(ConfigError, match="mixes block sizes"):
        read_trace(str(tmp_path))
