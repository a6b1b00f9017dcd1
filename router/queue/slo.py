"""Early rejection: a request that would miss the targets is refused at its arrival, before anything is computed for it.

Two predictions are made from what the policies have learnt of the workers' speed. The *time to the first token* is the wait of those in
line before it plus what the best worker would need now. The *time per token* is that of a decode step with the KV that will be in use when
the request's prefill ends: what is there now, with what will have come and without what will have gone by then
(`kvpool.policy.admission.early`). A target of 0 is none, and a policy that learns nothing predicts nothing.
"""

from dataclasses import dataclass

from kvpool.clock import Clock
from kvpool.policy.admission.early import EarlyRejection, Rejection
from kvpool.policy.routing import Scored
from kvpool.policy.routing.estimate import Estimate
from kvpool.units import SECOND
from router.queue.refusal import RefusedError, after_s

_TTFT_TERMS = ("queue", "load", "compute", "adapter")
_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Seconds to the first token, and between tokens; 0: none."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return self.ttft_s > 0 or self.tpot_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request as it arrives: its prompt and expected answer, the best worker for its first token, prompt tokens in line before it."""

    request_id: str
    tokens: int
    best: Scored
    before_tokens: float
    workers: int
    """That share what is in line."""


class Forecast:
    """The predictions of one router."""

    def __init__(self, targets: Targets, clock: Clock) -> None:
        self._targets = targets
        self._clock = clock
        self._decode = EarlyRejection(Rejection.PREDICTED, _NO_LIMIT)

    @property
    def any(self) -> bool:
        """Whether anybody may be refused."""
        return self._targets.any

    def admit(self, arrival: Arrival, first: Estimate, decode: Estimate, *, decode_workers: int, kv_tokens: int) -> None:
        """Raise `RefusedError` for a request that would miss a target. `kv_tokens`: room of all decode workers, 0 unknown."""
        now_ns = self._clock.now_ns()
        line_s = first.compute_s(round(arrival.before_tokens / max(1, arrival.workers)), 0)
        ttft_s = line_s + sum(value for name, value in arrival.best.terms if name in _TTFT_TERMS)
        if 0 < self._targets.ttft_s < ttft_s:
            what = f"the first token would take {ttft_s:.1f} s, and {self._targets.ttft_s:g} s is the target"
            raise _refused("slo_ttft", what, ttft_s - self._targets.ttft_s)
        ready_ns = now_ns + int(ttft_s * SECOND)
        self._decode.capacity_tokens = kv_tokens or _NO_LIMIT
        verdict = self._decode.ask(arrival.tokens, ready_ns, now_ns)
        if not verdict.accepted:
            what = f"decode workers would be {verdict.load:.0%} full when the prompt is computed"
            raise _refused("slo_tpot", what, verdict.retry_after_s)
        in_use = verdict.load * self._decode.capacity_tokens
        step_s = decode.step_s(round(in_use / max(1, decode_workers)))
        if 0 < self._targets.tpot_s < step_s:
            what = f"a token would take {1000 * step_s:.0f} ms, and {1000 * self._targets.tpot_s:g} ms is the target"
            raise _refused("slo_tpot", what, self._decode.decode_s / 2)
        self._decode.coming(arrival.request_id, arrival.tokens, ready_ns)

    def decoding(self, request_id: str, tokens: int) -> None:
        """Its prompt is computed."""
        if self.any:
            self._decode.prefilled(request_id, tokens, self._clock.now_ns())

    def ended(self, request_id: str) -> None:
        """It is over, wherever it was."""
        self._decode.ended(request_id, self._clock.now_ns())


def _refused(reason: str, what: str, wait_s: float) -> RefusedError:
    return RefusedError(reason, f"the server is too busy to answer in time: {what}", after_s(wait_s))
