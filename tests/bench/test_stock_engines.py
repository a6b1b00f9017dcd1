"""`bench.stock_engines` on stand-ins; `tests/engines/test_router.py` runs it on vLLM itself."""

from pathlib import Path

from bench.stock_engines import good, measure
from router.testing.model import write_tiny_model


async def test_repeats_go_to_the_holder_over_lost_events_reset_and_restart(tmp_path: Path) -> None:
    """The whole way with processes and sockets; the engines are stand-ins."""
    found = await measure(vllm=None, model=write_tiny_model(tmp_path), prompts=6, tokens=200, lose=0.3, logs=tmp_path)
    assert good(found), found
    assert found["cached_share"] > 0.9
    assert "Traceback" not in (tmp_path / "router.log").read_text()
