"""A real `transformers` model under a session: prompt, decode, and what does not change."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvpool.engine.attention.network import new_session, read_prompt, score, use_sessions
from kvpool.engine.attention.settings import parse_attention
from kvpool.errors import LocalError

PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(60)]
SMALL = ["streaming:budget=0.25", "h2o:budget=0.25", "snapkv:budget=0.25,window=8", "quest:budget=12,page=4,dense=1"]


@pytest.fixture(scope="module")
def network(tiny: Path) -> Any:
    made = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    use_sessions(made)
    return made


def decode(
    network: Any, text: str, *, chunk: int = 16, steps: int = 8, force: list[int] | None = None
) -> tuple[list[int], torch.Tensor, Any]:
    """Greedy tokens (or `force`), the scores before each, and the session."""
    settings = parse_attention(text)
    session = None if settings is None else new_session(network, settings)
    cache = DynamicCache()
    for start in range(0, len(PROMPT) - 1, chunk):
        read_prompt(network, cache, PROMPT[start : min(start + chunk, len(PROMPT) - 1)], session)
    seen = [score(network, cache, PROMPT[-1:], session)[-1]]
    if session is not None:
        session.settle(len(PROMPT))
    tokens = [int(seen[0].argmax())]
    for step in range(steps):
        token = tokens[-1] if force is None else force[step]
        seen.append(score(network, cache, [token], session)[-1])
        tokens.append(int(seen[-1].argmax()))
    return tokens, torch.stack(seen), session


def test_full_equals_transformers(network: Any, tiny: Path) -> None:
    """The registered function, in chunks and steps, is the attention that the model has by itself."""
    plain = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    with torch.inference_mode():
        out = plain.generate(
            torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT)), max_new_tokens=9, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    assert decode(network, "full")[0] == out[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("name", ["streaming", "h2o", "snapkv", "quest"])
def test_whole_budget_gives_the_scores_of_full_attention(network: Any, name: str) -> None:
    """End to end: a technique that may read everything changes nothing, and its tokens stay publishable."""
    tokens, scores, _ = decode(network, "full")
    same, close, session = decode(network, f"{name}:budget=500")
    assert same == tokens
    assert torch.allclose(close, scores, atol=1e-4)
    assert session.taint.publishable(68) == 68


@pytest.mark.parametrize("text", SMALL)
def test_small_budget_decodes_and_taints_only_the_answer(network: Any, text: str) -> None:
    """The first token comes from a pure prompt; after it scores differ from full attention, whatever the chunks."""
    tokens, scores, _ = decode(network, "full")
    _, other, session = decode(network, text, force=tokens)
    _, chunked, _ = decode(network, text, chunk=60, force=tokens)
    assert torch.allclose(other[0], scores[0], atol=1e-4)
    assert not torch.allclose(other[1:], scores[1:], atol=1e-2)
    assert torch.allclose(other, chunked, atol=1e-4)
    assert session.taint.publishable(68) == 60


def test_each_sequence_has_a_technique_of_its_own(network: Any) -> None:
    """One model, passes of several requests in turn: a session leaves no trace in another's sequence."""
    before = decode(network, "full")[1]
    decode(network, SMALL[1])
    assert torch.equal(decode(network, "full")[1], before)


def test_a_batch_is_refused(network: Any) -> None:
    """A session is of one sequence."""
    with pytest.raises(LocalError, match="one sequence"), torch.inference_mode():
        network(input_ids=torch.zeros(2, 3, dtype=torch.long), session=None)
