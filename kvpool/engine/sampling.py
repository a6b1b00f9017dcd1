"""The next token from the model's scores: a pure function of (scores, sampling, position).

Theory. Temperature divides the scores, top-k keeps the k best, softmax makes probabilities of them, top-p keeps the shortest
run of the best whose probabilities reach p; then one uniform number is looked up in the cumulated rest (inverse CDF). Equal
scores are ordered by token id, so there is one right answer. The uniform number of position p is a hash of (seed, p): no
generator has a state that would be lost with a worker, and a retried request goes on with the same tokens.
"""

import hashlib
import struct

import numpy as np
import numpy.typing as npt

from kvpool.errors import LocalError
from kvpool.request import Sampling

Scores = npt.NDArray[np.float32]


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token at `position`; 53 random bits."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8, person=b"kvpool draw").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


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
