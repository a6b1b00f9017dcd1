"""Early rejection: don't prefill what decode can't take (Mooncake, FAST'25 and arXiv 2407.00079, section 7). Pure; time is an argument.

Load = KV of the requests in decode, prompt and answer, over what decode has room for. A request that finds the load above `limit` when its
prefill is done is rejected then, and its prefill was wasted. Three ways to say no before:

* none: never;
* early: when the load is above the limit now. Since what is being prefilled isn't in it, too many are let in while decode is idle, and
  too few while it is busy: the load swings;
* predicted: when it will be above the limit at the time the request's prefill ends. To the load of now come those whose prefill ends by
  then; who is late already is taken to be late for as long again. It falls as requests end: after t seconds exp(-t / t_d) of each is
  expected to be there still, t_d the mean time that requests decode, learnt from those that have ended. (The paper lets every request
  decode for exactly t_d; answers are too unequal for that.)
"""

from collections import OrderedDict
from enum import StrEnum
from math import exp
from typing import NamedTuple

from kvpool.units import SECOND

_DECODE_S = 10.0
_MEMORY = 64
MAX_REQUESTS = 1 << 16
"""Requests followed; the oldest is forgotten first."""


class Rejection(StrEnum):
    """When a request that decode can't take is turned away before its prefill."""

    NONE = "none"
    EARLY = "early"
    PREDICTED = "predicted"


class Verdict(NamedTuple):
    """Whether a request may begin, the load that was looked at, and when to ask again (seconds; 0: now)."""

    accepted: bool
    load: float
    retry_after_s: float = 0.0


class EarlyRejection:
    """The decode load of one cluster, as one router sees it. Tokens are those of prompt and answer together."""

    def __init__(self, mode: Rejection, capacity_tokens: int, *, limit: float = 1.0) -> None:
        if capacity_tokens < 1 or limit <= 0:
            raise ValueError("capacity_tokens and limit must be positive")
        self.mode = mode
        self.capacity_tokens = capacity_tokens
        self._limit = limit
        self._coming: OrderedDict[str, tuple[int, int]] = OrderedDict()  # tokens, when its prefill ends
        self._decoding: OrderedDict[str, tuple[int, int]] = OrderedDict()  # tokens, since when
        self._in_use = 0
        self.decode_s = _DECODE_S
        """t_d."""

    def load(self, tokens: int = 0) -> float:
        """The load now, with `tokens` more."""
        return (self._in_use + tokens) / self.capacity_tokens

    def predicted(self, at_ns: int, now_ns: int, tokens: int = 0) -> float:
        """The load foreseen now for a time to come, with `tokens` more."""
        there = self._in_use * self._stays(at_ns - now_ns) + tokens
        for size, ready_ns in self._coming.values():
            expected_ns = max(ready_ns, 2 * now_ns - ready_ns)
            if expected_ns <= at_ns:
                there += size * self._stays(at_ns - expected_ns)
        return there / self.capacity_tokens

    def _stays(self, after_ns: int) -> float:
        """The part of a request that is expected to be there still."""
        return exp(-max(0, after_ns) / SECOND / self.decode_s)

    def ask(self, tokens: int, ready_ns: int, now_ns: int) -> Verdict:
        """May a request of `tokens` begin, whose prefill would end at `ready_ns`?"""
        if self.mode is Rejection.NONE:
            return Verdict(True, self.load(tokens))
        load = self.load(tokens) if self.mode is Rejection.EARLY else self.predicted(ready_ns, now_ns, tokens)
        if load <= self._limit:
            return Verdict(True, load)
        return Verdict(False, load, self._room_in_s(tokens, now_ns))

    def coming(self, request_id: str, tokens: int, ready_ns: int) -> None:
        """The request has begun; its prefill will end at about `ready_ns`."""
        self._coming[request_id] = tokens, ready_ns
        if len(self._coming) > MAX_REQUESTS:
            self._coming.popitem(last=False)

    def prefilled(self, request_id: str, tokens: int, now_ns: int) -> bool:
        """Its prefill is done: whether decode takes it, and if so it is there from now on."""
        self._coming.pop(request_id, None)
        if self.load(tokens) > self._limit:
            return False
        self._decoding[request_id] = tokens, now_ns
        self._in_use += tokens
        if len(self._decoding) > MAX_REQUESTS:
            self._in_use -= self._decoding.popitem(last=False)[1][0]
        return True

    def ended(self, request_id: str, now_ns: int) -> None:
        """It is over, wherever it was; unknown ones are ignored."""
        self._coming.pop(request_id, None)
        known = self._decoding.pop(request_id, None)
        if known is not None:
            self._in_use -= known[0]
            self.decode_s += (max(0.001, (now_ns - known[1]) / SECOND) - self.decode_s) / _MEMORY

    def _room_in_s(self, tokens: int, now_ns: int) -> float:
        """When those that go first will have made room, by t_d; at least a second."""
        need = self._in_use + tokens - int(self._limit * self.capacity_tokens)
        for size, began in self._decoding.values():
            need -= size
            if need <= 0:
                return max(1.0, self.decode_s - (now_ns - began) / SECOND)
        return max(1.0, self.decode_s)
