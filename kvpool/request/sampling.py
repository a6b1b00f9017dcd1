"""How the next token is chosen."""

import math
from dataclasses import dataclass

from kvpool.errors import ConfigError

MAX_LOGPROBS = 20
"""Alternatives told beside a token."""
MAX_LOGIT_BIAS = 1024
"""Tokens with a bias of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of one request.

    `temperature == 0` is greedy. `top_k == 0` and `top_p == 1` switch the filters off. The draw for the token at
    position p depends on (`seed`, p) only, so a request that is retried on another worker continues with the same tokens.

    `presence_penalty` is taken off the score of each token generated before, `frequency_penalty` once for each time; `logit_bias` is
    (token, what to add to its score). `logprobs`: how many of the likeliest tokens to tell with each token, None for no
    log-probabilities at all.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 2.0):
            raise ConfigError(f"temperature must be between 0 and 2, got {self.temperature}")
        if not (0.0 < self.top_p <= 1.0):
            raise ConfigError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k < 0:
            raise ConfigError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if not (0 <= self.seed < 2**64):
            raise ConfigError(f"seed must be an unsigned 64-bit integer, got {self.seed}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise ConfigError(f"{name} must be between -2 and 2, got {getattr(self, name)}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS or any(token < 0 or not -100.0 <= bias <= 100.0 for token, bias in self.logit_bias):
            raise ConfigError(f"logit_bias holds at most {MAX_LOGIT_BIAS} tokens, each with a bias between -100 and 100")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ConfigError(f"logprobs must be between 0 and {MAX_LOGPROBS}, got {self.logprobs}")

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def adjusts(self) -> bool:
        """True when the scores are changed before a token is chosen."""
        return bool(self.logit_bias or self.presence_penalty or self.frequency_penalty)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """How likely the model held a token: natural logarithms of probabilities before temperature, penalties, biases and filters.

    `chosen` is the token's own; `top` are (token, logarithm) of the likeliest, best first, as many as were asked for.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()
