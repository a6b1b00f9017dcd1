"""`bench.vllm` on a small load: what an engine computed and forgot comes back from the pool, by vLLM's own count."""

from pathlib import Path

import pytest

from bench.vllm import Load, contest


@pytest.mark.timeout(900)
def test_second_pass_comes_from_the_pool(vllm_python: str, small_model: Path, tmp_path: Path) -> None:
    """Of prompts of 320 tokens two blocks of 128 come from outside, none fails, and the answers don't depend on where they come from."""
    found = contest("kvpool", vllm_python, small_model, tmp_path, Load(prefixes=3, prompts=3, prefix=256, suffix=64))
    assert found.first.failed == found.second.failed == 0
    assert found.first.external_tokens == 0
    assert found.second.external_tokens >= 3 * 256
    assert found.tokens == found.tokens_again
