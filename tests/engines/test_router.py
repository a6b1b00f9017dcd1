"""The router in front of vLLM itself; `tests/bench/test_stock_engines.py` does the same with stand-ins."""

from pathlib import Path

import pytest

from bench.stock_engines import good, measure


@pytest.mark.timeout(1500)
async def test_repeats_go_to_the_holder_in_front_of_vllm(vllm_python: str, small_model: Path, tmp_path: Path) -> None:
    """Two vLLM servers with the small model, known by nothing but their HTTP API and their ZMQ events."""
    found = await measure(vllm=vllm_python, model=small_model, prompts=6, tokens=400, lose=0.2, logs=tmp_path)
    assert good(found), found
    assert found["cached_share"] > 0.9
