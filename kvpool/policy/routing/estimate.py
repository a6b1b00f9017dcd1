"""How long things take, learnt from what they took: prefill by length of the context, loads by tier and link, adapters, decode steps.

* *Prefill* of m tokens behind p: overhead + x m + y m (2 p + m) + z p. The third part is attention, (p + m)^2 - p^2; the last one brings
  what is held into the device. One model for all workers of a role, times a speed per worker.
* *Loads*: seconds a token by (tier, near). One that was never seen has a fixed part of the prefill's seconds a token, so that before
  anything is known loading beats computing, near beats far, and memory beats disk.
* *Decode step*: base + w x tokens of KV in use there.
"""

from dataclasses import dataclass
from typing import Final

from kvpool.policy.routing.fit import Fit
from kvpool.policy.routing.values import Load, Observed, Source, Tier, WorkerRef
from kvpool.units import SECOND

_PART_OF_PREFILL: Final = {
    (Tier.GPU, True): 0.01,
    (Tier.DRAM, True): 0.02,
    (Tier.SSD, True): 0.3,
    (Tier.GPU, False): 0.05,
    (Tier.DRAM, False): 0.1,
    (Tier.SSD, False): 0.4,
}
_TOKEN_S: Final = 1e-4
"""First guess: seconds to prefill a token."""
_ADAPTER_S: Final = 0.5
_STEP_S: Final = 0.03
_MEMORY: Final = 16
_SPEED_KEPT: Final = 0.98
_SPEED_PRIOR_S: Final = 3.0
_LOADS_KEPT: Final = 0.99


@dataclass(slots=True)
class _Rate:
    tokens: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class _Speed:
    """Of one worker: what it took, over what was expected of an average one; long work counts for more."""

    took: float = 0.0
    expected: float = 0.0

    @property
    def factor(self) -> float:
        """1 for an average worker, drawn there as if it had been seen to work like one for some seconds."""
        return (self.took + _SPEED_PRIOR_S) / (self.expected + _SPEED_PRIOR_S)


class Estimate:
    """All that one router has learnt about its workers' speed."""

    def __init__(self) -> None:
        self._prefill = Fit((0.0, 1e3 * _TOKEN_S, 0.0, 0.0))
        self._step = Fit((_STEP_S, 0.0))
        self._loads: dict[tuple[Tier, bool], _Rate] = {}
        self._speed: dict[WorkerRef, _Speed] = {}
        self._adapter_s = _ADAPTER_S

    def compute_s(self, computed: int, context: int, worker: WorkerRef | None = None) -> float:
        """Seconds to prefill `computed` tokens behind `context` others, on `worker` or on an average one."""
        if computed <= 0:
            return 0.0
        speed = self._speed.get(worker) if worker is not None else None
        return self._prefill.seconds(_features(computed, context)) * (speed.factor if speed is not None else 1.0)

    def token_s(self, worker: WorkerRef | None = None) -> float:
        """Seconds to prefill a token at the head of a prompt: what prices of memory are reckoned in."""
        return self.compute_s(1000, 0, worker) / 1000

    def load_s(self, source: Source) -> float:
        """Seconds to load `source`, without the wait until it can begin to send."""
        return source.tokens * self.load_token_s(source.tier, source.near)

    def load_token_s(self, tier: Tier, near: bool) -> float:
        """Seconds a token."""
        rate = self._loads.get((tier, near))
        if rate is not None:
            return rate.seconds / rate.tokens
        return _PART_OF_PREFILL[tier, near] * self.token_s()

    @property
    def adapter_s(self) -> float:
        """Seconds to load an adapter."""
        return self._adapter_s

    def step_s(self, decode_tokens: int) -> float:
        """Seconds between two tokens of a decode worker with so much KV in use."""
        return self._step.seconds((1.0, decode_tokens / 1e5))

    def observe(self, worker: WorkerRef, seen: Observed) -> None:
        """A first token came about like this."""
        for load in seen.loads:
            self.loaded(load)
        if seen.adapter_ns > 0:
            self._adapter_s += (seen.adapter_ns / SECOND - self._adapter_s) / _MEMORY
        if seen.computed_tokens > 0 and seen.compute_ns > 0:
            features = _features(seen.computed_tokens, seen.context_tokens)
            expected, took = self._prefill.seconds(features), seen.compute_ns / SECOND
            if expected > 0:
                speed = self._speed.setdefault(worker, _Speed())
                speed.took = speed.took * _SPEED_KEPT + took
                speed.expected = speed.expected * _SPEED_KEPT + expected
            self._prefill.add(features, took)

    def loaded(self, load: Load) -> None:
        """A load took so long."""
        if load.tokens > 0 and load.load_ns > 0:
            rate = self._loads.setdefault((load.tier, load.near), _Rate())
            rate.tokens = rate.tokens * _LOADS_KEPT + load.tokens
            rate.seconds = rate.seconds * _LOADS_KEPT + load.load_ns / SECOND

    def stepped(self, decode_tokens: int, step_ns: int) -> None:
        """A decode step with so much KV in use took so long."""
        self._step.add((1.0, decode_tokens / 1e5), step_ns / SECOND)

    def forget(self, worker: WorkerRef) -> None:
        """That incarnation is gone."""
        self._speed.pop(worker, None)


def _features(computed: int, context: int) -> tuple[float, float, float, float]:
    return 1.0, computed / 1e3, computed * (2.0 * context + computed) / 1e9, context / 1e5
