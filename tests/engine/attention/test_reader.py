"""A session in the engine's own passes: batched with sequences that have none, over paged blocks."""

from collections.abc import Iterator

import pytest
import torch

from kvpool.engine.attention.network import new_session
from kvpool.engine.attention.reader import SessionReader
from kvpool.engine.attention.settings import parse_attention
from kvpool.engine.model import Model
from kvpool.engine.paged.attention import Segment
from kvpool.engine.paged.store import KvStore
from kvpool.errors import LocalError

PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(60)]
BLOCKS, OTHERS = [3, 9, 1, 4, 11, 6, 2, 8, 10], range(20, 24)


@pytest.fixture
def store(model: Model) -> Iterator[KvStore]:
    made = KvStore(model.geometry, 32)
    yield made
    made.close()


def reader_of(model: Model, text: str) -> SessionReader:
    settings = parse_attention(text)
    assert settings is not None
    return SessionReader(new_session(model._network, settings), prompt=len(PROMPT))


def scores_of(model: Model, store: KvStore, reader: SessionReader | None) -> torch.Tensor:
    """The prompt in two chunks and eight tokens, each beside a token of another sequence; the scores of all nine."""
    passes = [(0, PROMPT[:32]), (32, PROMPT[32:]), *((60 + i, [11 * i % 256]) for i in range(8))]
    out = []
    for number, (start, tokens) in enumerate(passes):
        segments = [Segment(BLOCKS, start, tokens, reader=reader), Segment(OTHERS, number, [5])]
        out.append(model.run(store, segments)[0])
    return torch.stack(out[1:])


@pytest.mark.parametrize("name", ["streaming", "h2o", "snapkv", "quest"])
def test_whole_budget_changes_nothing_in_a_batch(model: Model, store: KvStore, name: str) -> None:
    """The same scores as without a reader, bit for bit: it makes the same calls."""
    plain = scores_of(model, store, None)
    reader = reader_of(model, f"{name}:budget=500")
    assert torch.equal(scores_of(model, store, reader), plain)
    assert reader.session.taint.publishable(68) == 68


@pytest.mark.parametrize(
    "text", ["streaming:budget=0.25", "h2o:budget=0.25", "snapkv:budget=0.25,window=8", "quest:budget=12,page=4,dense=0"]
)
def test_small_budget_leaves_the_prompt_pure_and_taints_the_answer(model: Model, store: KvStore, text: str) -> None:
    """What is published of the prompt is what anybody else would have computed, to the bit; nothing behind it is published."""
    plain = scores_of(model, store, None)
    slots = [block * 8 + at for block in BLOCKS for at in range(8)]
    keys = store.keys[:, :, slots].clone()
    reader = reader_of(model, text)
    scores = scores_of(model, store, reader)
    assert torch.equal(scores[0], plain[0])
    assert not torch.allclose(scores[1:], plain[1:], atol=1e-2)
    assert reader.session.taint.publishable(68) == 60
    again = store.keys[:, :, slots]
    assert torch.equal(again[:, :, :60], keys[:, :, :60])
    assert not torch.allclose(again[1:, :, 60:68], keys[1:, :, 60:68], atol=1e-3)


def test_a_pass_over_the_prompts_end_is_refused(model: Model, store: KvStore) -> None:
    """Half of it would be chosen from, half not."""
    with pytest.raises(LocalError, match="over the end"):
        model.run(store, [Segment(BLOCKS, 0, [*PROMPT, 1], reader=reader_of(model, "h2o"))])
