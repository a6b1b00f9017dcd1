"""Sampling against exact cases, a plain reference and the distribution it claims to draw from."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.engine.sampling import Scores, adjusted, candidates, choose, logprobs_of, sample, uniform
from kvpool.errors import LocalError
from kvpool.request import Sampling


def _scores(*values: float) -> Scores:
    return np.array(values, np.float32)


def _reference(scores: list[float], sampling: Sampling, position: int) -> int:
    """The documented rule, in exact order, with Python floats."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = [math.exp((scores[i] - scores[order[0]]) / sampling.temperature) for i in order]
    total, kept, mass = sum(weights), 0, 0.0
    while kept < len(order) and (kept == 0 or mass < sampling.top_p or sampling.top_p == 1.0):
        mass += weights[kept] / total
        kept += 1
    drawn, acc = uniform(sampling.seed, position) * mass, 0.0
    for i in range(kept):
        acc += weights[i] / total
        if drawn < acc:
            return order[i]
    return order[kept - 1]


def test_uniform_is_pinned() -> None:
    """The draw is part of the contract between workers of different versions: it must never change."""
    assert uniform(0, 0) == 0.9098682684554449
    assert uniform(7, 4096) == 0.4961762104949564
    assert uniform(2**64 - 1, 2**32) == 0.20199448620484606


def test_uniform_is_uniform() -> None:
    """Over positions and over seeds alike: 20 bins, chi-square below its 99.99 % point (50.8 for 19 degrees)."""
    for draws in ([uniform(3, p) for p in range(20_000)], [uniform(s, 3) for s in range(20_000)]):
        assert all(0.0 <= u < 1.0 for u in draws)
        counts = Counter(int(u * 20) for u in draws)
        assert sum((counts[b] - 1000) ** 2 / 1000 for b in range(20)) < 50.8


def test_choose_greedy_takes_the_first_of_the_best() -> None:
    """Ties have one right answer, the lowest id, so that two workers agree."""
    assert choose(_scores(1, 3, 3, 2), Sampling(), 5) == 1
    assert choose(_scores(-math.inf, -5), Sampling(), 0) == 1


def test_choose_draws_by_inverse_cdf() -> None:
    """With probabilities 1/2, 1/4, 1/4 the drawn number alone decides: below .5 the best, then .75, then the last."""
    scores = _scores(math.log(0.25), math.log(0.5), math.log(0.25))
    for position in range(200):
        u = uniform(11, position)
        expected = 1 if u < 0.5 else 0 if u < 0.75 else 2
        assert choose(scores, Sampling(temperature=1.0, seed=11), position) == expected


def test_candidates_top_k_breaks_ties_by_id() -> None:
    """When the k-th best has equals, the lower ids stay."""
    tokens, weights = candidates(_scores(1, 2, 1, 2, 1), Sampling(temperature=1.0, top_k=3))
    assert tokens.tolist() == [1, 3, 0]
    assert weights.sum() == pytest.approx(1.0)


def test_candidates_top_p_keeps_the_shortest_run_that_reaches_p() -> None:
    """Probabilities .5 .3 .2: p=.5 needs one, p=.51 two, p=.8 two, p=.81 three; one always stays."""
    scores = np.log(_scores(0.2, 0.5, 0.3))
    for top_p, expected in ((0.01, [1]), (0.499, [1]), (0.51, [1, 2]), (0.79, [1, 2]), (0.81, [1, 2, 0])):
        assert candidates(scores, Sampling(temperature=1.0, top_p=top_p))[0].tolist() == expected


def test_choose_with_top_k_one_is_greedy() -> None:
    """k=1 leaves nothing to draw."""
    scores = np.random.default_rng(0).normal(size=500).astype(np.float32)
    assert {choose(scores, Sampling(temperature=2.0, top_k=1, seed=s), 9) for s in range(20)} == {int(scores.argmax())}


def test_choose_with_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    """Large scores over a tiny temperature must not become infinite."""
    assert choose(_scores(80, 90, -90), Sampling(temperature=1e-6, seed=4), 1) == 1


def test_choose_of_scores_that_are_not_numbers_is_an_error() -> None:
    """A model that overflowed has no right token; a random one must not be passed off as its answer."""
    for bad in (_scores(1, math.nan), _scores(math.inf, 1), _scores(-math.inf, -math.inf)):
        for sampling in (Sampling(), Sampling(temperature=1.0)):
            with pytest.raises(LocalError, match="not finite"):
                choose(bad, sampling, 3)


@given(
    st.lists(st.integers(-40, 40).map(lambda i: i / 8), min_size=1, max_size=30),
    st.integers(0, 2**64 - 1),
    st.integers(0, 10_000),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.integers(0, 32),
    st.sampled_from([0.05, 0.37, 0.9, 1.0]),
)
def test_choose_equals_the_rule_as_written(
    scores: list[float], seed: int, position: int, temperature: float, top_k: int, top_p: float
) -> None:
    """The vectorised code follows the documented rule on every combination of filters (but for draws within rounding of an edge)."""
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    chosen = choose(np.array(scores, np.float32), sampling, position)
    if chosen != _reference(scores, sampling, position):
        tokens, weights = candidates(np.array(scores, np.float32), sampling)
        cumulated = weights.cumsum(dtype=np.float64)
        edge = np.abs(cumulated - uniform(seed, position) * cumulated[-1]).min()
        near_p = np.abs(candidates(np.array(scores, np.float32), Sampling(temperature=temperature, top_k=top_k))[1].cumsum() - top_p).min()
        assert min(edge, near_p) < 1e-5
        assert chosen in tokens


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.7, seed=1), Sampling(temperature=1.2, top_k=6, top_p=0.9, seed=2)])
def test_choose_over_positions_follows_the_distribution(sampling: Sampling) -> None:
    """20,000 positions with one seed: chi-square of the counts below the 99.99 % point for their degrees of freedom."""
    scores = np.random.default_rng(3).normal(size=12).astype(np.float32)
    tokens, weights = candidates(scores, sampling)
    counts = Counter(choose(scores, sampling, position) for position in range(20_000))
    assert set(counts) <= set(tokens.tolist())
    expected = {int(t): 20_000 * float(w) / float(weights.sum()) for t, w in zip(tokens, weights, strict=True)}
    chi_square = sum((counts[t] - e) ** 2 / e for t, e in expected.items())
    freedom = len(expected) - 1
    assert chi_square < freedom + 3.7 * math.sqrt(2 * freedom) + 10


def test_adjusted_adds_biases_and_takes_penalties_off_by_count() -> None:
    """A presence penalty counts once, a frequency penalty each time; the scores given stay as they were."""
    scores = _scores(1, 1, 1, 1)
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((3, 2.0), (9, 1.0)))
    assert adjusted(scores, sampling, [1, 1, 2]).tolist() == [1.0, 0.0, 0.25, 3.0]
    assert scores.tolist() == [1, 1, 1, 1]
    assert adjusted(scores, sampling, []).tolist() == [1.0, 1.0, 1.0, 3.0]


def test_sample_chooses_from_adjusted_scores_and_tells_the_models_own_logprobs() -> None:
    """A banned token is not chosen, and is still told as the likeliest: the caller sees what the model thinks."""
    scores = np.log(_scores(0.5, 0.3, 0.2))
    sampled = sample(scores, Sampling(logit_bias=((0, -100.0),), logprobs=2), 4, [])
    assert sampled.token == 1
    assert sampled.logprobs is not None
    assert sampled.logprobs.chosen == pytest.approx(math.log(0.3), abs=1e-6)
    assert [token for token, _ in sampled.logprobs.top] == [0, 1]
    assert sample(scores, Sampling(), 4, []).logprobs is None


def test_logprobs_sum_to_one_and_break_ties_by_id() -> None:
    """Whatever the scale of the scores: the probabilities of all tokens add up to 1; of equals the lower id comes first."""
    scores = _scores(1000, 1001, 1000, 998)
    told = logprobs_of(scores, 3, 4)
    assert [token for token, _ in told.top] == [1, 0, 2, 3]
    assert sum(math.exp(logprob) for _, logprob in told.top) == pytest.approx(1.0, abs=1e-5)
    assert told.chosen == told.top[3][1]
    assert [token for token, _ in logprobs_of(scores, 3, 2).top] == [1, 0]
    assert logprobs_of(scores, 3, 0).top == ()
