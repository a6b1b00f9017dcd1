"""The line in front of the workers: bounded, fair between tenants, urgent requests first, nobody for ever last. Pure; time is an argument.

Theory. Requests wait in classes, one per priority (a lower number is more urgent, as in vLLM). The most urgent class goes first, but a
class that waits gains on the others: it counts as one step more urgent for every `step_ns` since it last had its turn. So a class d steps
behind gets at least one turn every d x `step_ns`, and no more than that while the more urgent ones have work. Within a class the tenant
with the least service is next (`fairness.py`), of its users the one with the least, and of that one's requests the one that costs least,
but for age, as in the workers (`kvpool.policy.order`).

When the line is full somebody must go: the newest request of the tenant with the most waiting in the least urgent class, be it the newcomer
or not. So a flood displaces itself and not those who ask little. Who has had its turn already, in vain, stands in line `again`: before all
others of its tenant in its class, and nobody has its place, since it may have begun to answer.
"""

from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar

from kvpool.policy.admission.fairness import TokenCounters, user_of
from kvpool.policy.order import place
from kvpool.units import SECOND

T = TypeVar("T")

STEP_NS = 10 * SECOND


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waiting(Generic[T]):
    """One request in line: `cost` is what its tenant is charged when it goes, in tokens of prompt; `deadline_ns` is monotonic.

    `user`: who of the tenant's users it is of. `again`: it has had its turn, but not what it stood for.
    """

    item: T
    tenant: str = ""
    user: str = ""
    priority: int = 0
    cost: float = 0.0
    deadline_ns: int
    again: bool = False


@dataclass(slots=True, kw_only=True)
class _Class(Generic[T]):
    """Those of one priority: their lines by tenant, next first, and since when the class has waited for its turn.

    In a line stand (place, number in order of arrival, who).
    """

    since_ns: int
    lines: OrderedDict[str, list[tuple[float, int, Waiting[T]]]] = field(default_factory=OrderedDict)


class Line(Generic[T]):
    """At most `capacity` requests, besides those that wait again."""

    def __init__(self, capacity: int, counters: TokenCounters, *, users: TokenCounters | None = None, step_ns: int = STEP_NS) -> None:
        """`counters` of the tenants, `users` of their users; both may be shared with other lines."""
        if capacity < 1 or step_ns < 1:
            raise ValueError("a line needs room for at least one, and a step of at least 1 ns")
        self._capacity = capacity
        self._counters = counters
        self._users = TokenCounters() if users is None else users
        self._step_ns = step_ns
        self._classes: dict[int, _Class[T]] = {}
        self._tenants: dict[str, Counter[str]] = {}  # how many wait, by tenant and user
        self._length = self._arrivals = 0
        self._gone = 0.0  # what those cost who had their turn

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Waiting[T]]:
        for one in self._classes.values():
            for line in one.lines.values():
                yield from (one for _, _, one in line)

    def waiting_of(self, tenant: str) -> int:
        """How many of `tenant` wait."""
        return self._tenants[tenant].total() if tenant in self._tenants else 0

    def cost_before(self, priority: int) -> float:
        """What those cost who wait in this class or a more urgent one."""
        return sum(each.cost for each in self if each.priority <= priority)

    def offer(self, one: Waiting[T], now_ns: int) -> Waiting[T] | None:
        """Let `one` stand in line. Who has to go for it: itself, another, or None when there is room for all."""
        users = self._tenants.get(one.tenant, Counter[str]())
        if not users:
            self._counters.arrived(one.tenant, self._tenants)
        if not users[one.user]:
            self._users.arrived(user_of(one.tenant, one.user), [user_of(one.tenant, user) for user in users])
        self._put(one, now_ns)
        if one.again or self._length <= self._capacity:
            return None
        victim = self._least()
        self.discard(victim)
        return victim

    def next(self, now_ns: int) -> Waiting[T] | None:
        """Whose turn it is, taken out of the line and charged for; None when nobody waits."""
        if not self._classes:
            return None
        number = min(self._classes, key=lambda p: (p - (now_ns - self._classes[p].since_ns) / self._step_ns, p))
        of_class = self._classes[number]
        tenant = min(of_class.lines, key=self._counters.of)  # equal ones: who has stood in line for longer
        one = self._first(of_class.lines[tenant])
        self.discard(one)
        of_class.since_ns = now_ns
        self._gone += one.cost
        self._counters.served(tenant)
        self._counters.charge(tenant, one.cost)
        self._users.served(user_of(tenant, one.user))
        self._users.charge(user_of(tenant, one.user), one.cost)
        return one

    def discard(self, one: Waiting[T]) -> bool:
        """`one` waits no longer; False when it didn't."""
        of_class = self._classes.get(one.priority)
        line = of_class.lines.get(one.tenant) if of_class is not None else None
        at = next((at for at, each in enumerate(line or ()) if each[2] is one), None)
        if of_class is None or line is None or at is None:
            return False
        del line[at]
        self._length -= 1
        users = self._tenants[one.tenant]
        users[one.user] -= 1
        if not users[one.user]:
            del users[one.user]
        if not users:
            del self._tenants[one.tenant]
        if not line:
            del of_class.lines[one.tenant]
        if not of_class.lines:
            del self._classes[one.priority]
        return True

    def expired(self, now_ns: int) -> list[Waiting[T]]:
        """Those whose deadline has passed, taken out."""
        late = [one for one in self if one.deadline_ns <= now_ns]
        for one in late:
            self.discard(one)
        return late

    def _put(self, one: Waiting[T], now_ns: int) -> None:
        of_class = self._classes.setdefault(one.priority, _Class(since_ns=now_ns))
        self._arrivals += 1
        at = -inf if one.again else place(one.cost, self._gone)
        insort(of_class.lines.setdefault(one.tenant, []), (at, self._arrivals, one))
        self._tenants.setdefault(one.tenant, Counter())[one.user] += 1
        self._length += 1

    def _first(self, line: list[tuple[float, int, Waiting[T]]]) -> Waiting[T]:
        """Who of a tenant's line goes next: who waits again, else the first one of the user with the least service."""
        first = line[0][2]
        if first.again or len(self._tenants[first.tenant]) == 1:
            return first
        by_user: dict[str, Waiting[T]] = {}
        for _, _, one in line:
            by_user.setdefault(one.user, one)
        return by_user[min(by_user, key=lambda user: self._users.of(user_of(first.tenant, user)))]

    def _least(self) -> Waiting[T]:
        """The newest of the longest line of the least urgent class, of those that may go."""
        lines = next(lines for _, found in sorted(self._classes.items(), reverse=True) if (lines := _first_timers(found)))
        longest = max(len(line) for line in lines)
        line = next(line for line in reversed(lines) if len(line) == longest)
        return max((number, one) for _, number, one in line if not one.again)[1]


def _first_timers(of_class: _Class[T]) -> list[list[tuple[float, int, Waiting[T]]]]:
    """The lines of a class that don't consist of those that wait again."""
    return [line for line in of_class.lines.values() if not line[-1][2].again]
