"""`bench.stock_engines` on stand-ins, and on vLLM itself where there is one."""

import os
import shutil
import time
from pathlib import Path

import pytest

from bench.stock_engines import good, measure
from kvpool.config.models import resolve_model
from kvpool.units import SECOND
from router.testing.model import write_tiny_model

VLLM = os.environ.get("KVPOOL_VLLM_PYTHON") or ""


async def test_repeats_go_to_the_holder_over_lost_events_reset_and_restart(tmp_path: Path) -> None:
    """The whole way with processes and sockets; the engines are stand-ins."""
    found = await measure(vllm=None, model=write_tiny_model(tmp_path), prompts=6, tokens=200, lose=0.3, logs=tmp_path)
    assert good(found), found
    assert found["cached_share"] > 0.9
    assert "Traceback" not in (tmp_path / "router.log").read_text()


@pytest.mark.skipif(not shutil.which(VLLM), reason="KVPOOL_VLLM_PYTHON names no interpreter with vLLM for CPUs")
@pytest.mark.timeout(1500)
async def test_repeats_go_to_the_holder_in_front_of_vllm(tmp_path: Path) -> None:
    """Two vLLM servers with the small model, known by nothing but their HTTP API and their ZMQ events."""
    model = resolve_model("smollm2", deadline_ns=time.monotonic_ns() + 600 * SECOND)
    found = await measure(vllm=VLLM, model=model, prompts=6, tokens=400, lose=0.2, logs=tmp_path)
    assert good(found), found
    assert found["cached_share"] > 0.9
