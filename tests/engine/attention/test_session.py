"""A session: what a pass reads, exactly summed, and what that taints."""

import pytest
import torch

from kvpool.engine.attention.build import make_technique
from kvpool.engine.attention.partial import attend, grouped
from kvpool.engine.attention.rotation import moved
from kvpool.engine.attention.session import AttentionSession, full_attention
from kvpool.engine.attention.settings import StreamingSettings, parse_attention
from kvpool.engine.attention.streaming import Streaming
from kvpool.engine.attention.taint import Scope
from kvpool.engine.attention.technique import Selection, Technique, Traits
from kvpool.errors import LocalError

HEADS, KV_HEADS, DIM, PROMPT, TOKENS = 4, 2, 8, 40, 46
FREQUENCIES = 1e4 ** (-torch.arange(0, DIM, 2) / DIM)
SCALE = DIM**-0.5


@pytest.fixture
def qkv() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    queries, keys, values = (torch.randn(n, TOKENS, DIM, generator=draw) for n in (HEADS, KV_HEADS, KV_HEADS))
    return queries, keys, values


Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def session_of(technique: Technique, qkv: Qkv) -> AttentionSession:
    """A session that was shown the prompt."""
    queries, keys, values = qkv
    session = AttentionSession(technique, frequencies=FREQUENCIES)
    session.observe(0, queries[:, :PROMPT], keys[:, :PROMPT], values[:, :PROMPT], SCALE)
    session.settle(PROMPT)
    return session


def named(text: str) -> Technique:
    settings = parse_attention(text)
    assert settings is not None
    return make_technique(settings)


def steps(session: AttentionSession, qkv: Qkv) -> torch.Tensor:
    """Attention of the tokens after the prompt, one a pass."""
    queries, keys, values = qkv
    out = [session.attend(0, queries[:, t : t + 1], keys[:, : t + 1], values[:, : t + 1], SCALE) for t in range(PROMPT, TOKENS)]
    return torch.cat(out, dim=1)


class Half:
    """An index that reads the even tokens and estimates the odd ones, without error."""

    def __init__(self, qkv: Qkv, estimates: bool) -> None:
        self.traits = Traits(scope=Scope.PREFIX)
        self._keys = torch.empty(KV_HEADS, 0, DIM)
        self._values = qkv[2]
        self._estimates = estimates

    def append(self, layer: int, keys: torch.Tensor) -> None:
        self._keys = torch.cat((self._keys, keys), dim=1)

    def settle(self, prompt: int) -> None:
        pass

    def query(self, layer: int, queries: torch.Tensor) -> Selection:
        past = self._keys.shape[1]
        odd = attend(queries, self._keys[:, 1::2], self._values[:, 1:past:2], SCALE)
        return Selection(torch.arange(0, past, 2)[None], estimate=odd if self._estimates else None)


@pytest.mark.parametrize("n", [1, 3])
def test_estimate_of_what_is_not_read_is_part_of_the_sum(qkv: Qkv, n: int) -> None:
    """With an exact estimate the answer is full attention; without, it is not. The KV that follows is tainted either way."""
    queries, keys, values = (x[:, : PROMPT + n] for x in qkv)
    full = full_attention(queries[:, PROMPT:], keys, values, SCALE)
    for estimates in (True, False):
        session = session_of(Half(qkv, estimates), qkv)
        out = session.attend(0, queries[:, PROMPT:], keys, values, SCALE)
        assert torch.allclose(out, full, atol=1e-6) == estimates
        assert session.taint.publishable(PROMPT + n) == PROMPT


@pytest.mark.parametrize("text", ["streaming:budget=16", "h2o:budget=16", "snapkv:budget=16,window=4", "quest:budget=16,page=4,dense=0"])
def test_what_is_computed_beyond_the_budget_is_tainted_and_the_prompt_is_not(qkv: Qkv, text: str) -> None:
    """The prompt's blocks go to the pool under their prefix keys, the answer's never."""
    session = session_of(named(text), qkv)
    assert session.taint.publishable(PROMPT) == PROMPT
    out = steps(session, qkv)
    assert session.taint.publishable(TOKENS) == PROMPT
    assert not torch.allclose(out, full_attention(qkv[0][:, PROMPT:], *qkv[1:], SCALE), atol=1e-3)


@pytest.mark.parametrize("text", ["streaming:budget=46", "h2o:budget=46", "snapkv:budget=46,window=4", "quest:budget=48,page=4,dense=0"])
def test_a_budget_that_leaves_nothing_out_is_full_attention_and_taints_nothing(qkv: Qkv, text: str) -> None:
    """A technique costs nothing where it does nothing (Quest's budget is whole pages)."""
    session = session_of(named(text), qkv)
    assert torch.allclose(steps(session, qkv), full_attention(qkv[0][:, PROMPT:], *qkv[1:], SCALE), atol=1e-6)
    assert session.taint.publishable(TOKENS) == TOKENS


def test_taint_begins_with_the_first_token_that_missed_something(qkv: Qkv) -> None:
    """Not with the technique: here the budget suffices for three tokens more than the prompt."""
    session = session_of(named("h2o:budget=43"), qkv)
    steps(session, qkv)
    assert session.taint.publishable(TOKENS) == 44


def test_streaming_reads_sinks_as_if_they_stood_before_the_window(qkv: Qkv) -> None:
    """The same as attention over the cache's tokens with positions 0 to 16, the query's included."""
    queries, keys, values = (x[:, : PROMPT + 1] for x in qkv)
    session = session_of(Streaming(StreamingSettings(budget=16)), qkv)
    out = session.attend(0, queries[:, PROMPT:], keys, values, SCALE)
    inside = [*range(4), *range(28, 41)]  # 4 sinks, 12 recent, itself
    bare = torch.stack([moved(keys[:, t], -t, FREQUENCIES) for t in inside], dim=1)
    placed = torch.stack([moved(bare[:, at], at, FREQUENCIES) for at in range(17)], dim=1)
    query = moved(queries[:, PROMPT:], 16 - PROMPT, FREQUENCIES)
    expected = attend(grouped(query, KV_HEADS), placed, values[:, inside], SCALE).out.reshape(HEADS, 1, DIM)
    assert torch.allclose(out, expected, atol=1e-6)
    original = session_of(Streaming(StreamingSettings(budget=16, positions="original")), qkv)
    assert not torch.allclose(original.attend(0, queries[:, PROMPT:], keys, values, SCALE), expected, atol=1e-3)


def test_a_pass_of_several_tokens_sees_itself_causally(qkv: Qkv) -> None:
    """Three tokens at once read what the first of them alone would of the past, and each other up to themselves."""
    queries, keys, values = qkv
    session = session_of(named("snapkv:budget=16,window=4"), qkv)
    singly = session_of(named("snapkv:budget=16,window=4"), qkv)
    together = session.attend(0, queries[:, PROMPT:], keys, values, SCALE)
    assert torch.allclose(together, steps(singly, qkv), atol=1e-6)


def test_an_index_learns_of_a_loaded_prompt(qkv: Qkv) -> None:
    """It needs keys only, and gets each once: a prompt from the pool is as good as a computed one."""
    loaded = AttentionSession(named("quest:budget=16,page=4,dense=0"), frequencies=FREQUENCIES)
    loaded.settle(PROMPT)
    assert torch.equal(steps(loaded, qkv), steps(session_of(named("quest:budget=16,page=4,dense=0"), qkv), qkv))


@pytest.mark.parametrize("text", ["h2o:budget=16", "snapkv:budget=16,window=4"])
def test_a_selector_that_needs_queries_refuses_a_loaded_prompt(qkv: Qkv, text: str) -> None:
    """Full attention instead would be a silent fallback, a guess another technique."""
    session = AttentionSession(named(text), frequencies=FREQUENCIES)
    session.settle(PROMPT)
    with pytest.raises(LocalError, match="not shown"):
        steps(session, qkv)


def test_prompt_and_answer_are_not_mixed_up(qkv: Qkv) -> None:
    """What an engine might call in the wrong order is an error."""
    queries, keys, values = qkv
    session = AttentionSession(named("h2o"), frequencies=FREQUENCIES)
    with pytest.raises(LocalError, match="settle"):
        session.attend(0, queries, keys, values, SCALE)
    session.settle(PROMPT)
    with pytest.raises(LocalError, match="over"):
        session.observe(0, queries, keys, values, SCALE)


@pytest.mark.parametrize("n", [1, 7, 46])
def test_full_attention_is_causal_over_all_that_came_before(qkv: Qkv, n: int) -> None:
    """A step, a chunk behind others, a whole prompt."""
    queries, keys, values = qkv
    expected = torch.empty(HEADS, n, DIM)
    for head in range(HEADS):
        for row in range(n):
            upto = TOKENS - n + row + 1
            weights = (keys[head // 2, :upto] @ queries[head, upto - 1] * SCALE).softmax(0)
            expected[head, row] = weights @ values[head // 2, :upto]
    assert torch.allclose(full_attention(queries[:, TOKENS - n :], keys, values, SCALE), expected, atol=1e-6)
