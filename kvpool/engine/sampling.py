"""The next token from the model's scores: a pure function of (scores, sampling, position).

Theory. Temperature divides the scores, top-k keeps the k best, softmax makes probabilities of them, top-p keeps the shortest
run of the best whose probabilities reach p; then one uniform number is looked up in the cumulated rest (inverse CDF). Equal
scores are ordered by token id, so there is one right answer. The uniform number of position p is a hash of (seed, p): no
generator has a state that would be lost with a worker, and a retried request goes on with the same tokens.

Before all that the scores are adjusted, if asked for: biases added, penalties for tokens generated before taken off. These too
depend only on what a retry brings along. Log-probabilities are the model's own: softmax of the scores as they came.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.errors import LocalError
from kvpool.request import Logprobs, Sampling

Scores = npt.NDArray[np.float32]


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token at `position`; 53 random bits."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8, person=b"kvpool draw").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class Sampled(NamedTuple):
    """A token, and how likely it was when that was asked for."""

    token: int
    logprobs: Logprobs | None = None


def sample(scores: Scores, sampling: Sampling, position: int, generated: Sequence[int]) -> Sampled:
    """The token at `position`, from float32 scores ``[vocabulary]``; `generated` are the answer's tokens before it. Errors as `choose`."""
    token = choose(adjusted(scores, sampling, generated) if sampling.adjusts else scores, sampling, position)
    return Sampled(token, None if sampling.logprobs is None else logprobs_of(scores, token, sampling.logprobs))


def adjusted(scores: Scores, sampling: Sampling, generated: Sequence[int]) -> Scores:
    """A copy of `scores` with biases and penalties. A bias for a token that the model doesn't have is passed over."""
    scores = scores.copy()
    for token, bias in sampling.logit_bias:
        if token < scores.size:
            scores[token] += bias
    if generated and (sampling.presence_penalty or sampling.frequency_penalty):
        tokens, counts = np.unique(np.asarray(generated), return_counts=True)
        scores[tokens] -= (sampling.presence_penalty + sampling.frequency_penalty * counts).astype(np.float32)
    return scores


def logprobs_of(scores: Scores, token: int, top: int) -> Logprobs:
    """Of `token` and of the `top` likeliest tokens; equal ones by token id."""
    largest = scores.max()
    total = np.log(np.exp(scores - largest).sum(dtype=np.float64)) + largest
    weakest = np.partition(scores, -top)[-top] if 0 < top < scores.size else np.float32(-np.inf)
    tokens = np.flatnonzero(scores >= weakest) if top else np.arange(0)
    best = tokens[np.argsort(-scores[tokens], kind="stable")][:top]
    return Logprobs(chosen=float(scores[token] - total), top=tuple((int(other), float(scores[other] - total)) for other in best))


def choose(scores: Scores, sampling: Sampling, position: int) -> int:
    """The token at `position` (its index in prompt + generated), from float32 scores ``[vocabulary]``.

    Raises `LocalError` when the scores hold NaN or no finite maximum: there is no right token then.
    """
    best = int(scores.argmax())  # the first of equals; a NaN counts as the maximum
    if not np.isfinite(scores[best]):
        raise LocalError(f"the model's scores at position {position} are not finite; try --dtype float32")
    if sampling.greedy:
        return best
    tokens, weights = candidates(scores, sampling)
    cumulated = weights.cumsum(dtype=np.float64)
    drawn = uniform(sampling.seed, position) * cumulated[-1]
    return int(tokens[min(int(cumulated.searchsorted(drawn, side="right")), len(tokens) - 1)])


def candidates(scores: Scores, sampling: Sampling) -> tuple[npt.NDArray[np.int64], Scores]:
    """The tokens that may be drawn, best first, and their probabilities (before the last filter: they may sum to less than 1)."""
    tokens = np.arange(scores.size)
    if 0 < sampling.top_k < scores.size:
        weakest = np.partition(scores, scores.size - sampling.top_k)[scores.size - sampling.top_k]
        tokens = np.flatnonzero(scores >= weakest)
    order = tokens[np.argsort(-scores[tokens], kind="stable")][: sampling.top_k or None]
    # Subtract before dividing: a tiny temperature must not overflow.
    weights = np.exp((scores[order] - scores[order[0]]) / np.float32(sampling.temperature))
    weights /= weights.sum()
    if sampling.top_p < 1.0:
        keep = int(weights.cumsum(dtype=np.float64).searchsorted(sampling.top_p)) + 1
        order, weights = order[:keep], weights[:keep]
    return order, weights
