"""Virtual token counters: a fair share of the service for every tenant that wants it. Pure.

Theory (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024). Each tenant has a counter of the service it has had: `PROMPT`
for a token of its prompts, `ANSWER` for a token of its answers. Who has had the least goes next. A tenant that comes back after a rest is
lifted to the least counter among those that wait, so that what it didn't use then is no credit now; when nobody waits, to the counter of
the tenant that was served last. Between two tenants that both wait all the time the service then differs by at most::

    2 x max(PROMPT x largest prompt, ANSWER x tokens of all answers under way)

whatever they send, and nobody is held back while a place is free. The same holds among the users of one tenant, who have counters of their
own (`user_of`): whose turn it is in the tenant's.
"""

from collections import OrderedDict
from collections.abc import Iterable

PROMPT = 1.0
ANSWER = 2.0
"""A token of an answer takes a pass of its own; one of a prompt shares it with hundreds."""
MAX_TENANTS = 4096
"""Counters kept; the one that changed longest ago is forgotten first, which forgives that tenant what it had."""


def user_of(tenant: str, user: str) -> str:
    """The name of a tenant's user among the counters of all users."""
    return f"{tenant}\0{user}"


class TokenCounters:
    """The counters of one queue, of its tenants or of all their users. Tenants are names; "" is everybody who has none."""

    def __init__(self, max_tenants: int = MAX_TENANTS) -> None:
        if max_tenants < 1:
            raise ValueError("max_tenants must be at least 1")
        self._max_tenants = max_tenants
        self._counters: OrderedDict[str, float] = OrderedDict()
        self._last = 0.0

    def arrived(self, tenant: str, waiting: Iterable[str]) -> None:
        """`tenant`, of whom nobody waited, wants service; `waiting` are the tenants of whom somebody waits."""
        floor = min((self._counters[other] for other in waiting if other in self._counters), default=self._last)
        self._set(tenant, max(self._counters.get(tenant, 0.0), floor))

    def charge(self, tenant: str, amount: float) -> None:
        """`tenant` has had so much service."""
        self._set(tenant, self._counters.get(tenant, self._last) + amount)

    def served(self, tenant: str) -> None:
        """`tenant` is given a place: its counter is where those begin who come when nobody waits."""
        self._last = self.of(tenant)

    def of(self, tenant: str) -> float:
        """How much service `tenant` has had."""
        return self._counters.get(tenant, self._last)

    def __len__(self) -> int:
        return len(self._counters)

    def _set(self, tenant: str, counter: float) -> None:
        self._counters[tenant] = counter
        self._counters.move_to_end(tenant)
        if len(self._counters) > self._max_tenants:
            self._counters.popitem(last=False)
