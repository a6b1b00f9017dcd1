"""The line: who goes next, who has to go when it is full, who has waited too long."""

import random
from dataclasses import replace

import pytest

from kvpool.policy.admission.fairness import TokenCounters
from kvpool.policy.admission.line import STEP_NS, Line, Waiting
from kvpool.policy.order import AGING

FAR_NS = 1 << 60


def one(item: str, tenant: str = "", priority: int = 0, cost: float = 1.0, deadline_ns: int = FAR_NS) -> Waiting[str]:
    """A request."""
    return Waiting(item=item, tenant=tenant, priority=priority, cost=cost, deadline_ns=deadline_ns)


def order(line: Line[str], now_ns: int = 0) -> list[str]:
    """All that wait, in the order in which they go."""
    out = []
    while (each := line.next(now_ns)) is not None:
        out.append(each.item)
    return out


def test_equal_requests_of_one_tenant_go_in_the_order_of_arrival() -> None:
    """Nothing else would be explicable."""
    line: Line[str] = Line(10, TokenCounters())
    for item in "abcd":
        assert line.offer(one(item), 0) is None
    assert order(line) == list("abcd")
    assert line.next(0) is None


def test_cheap_request_of_a_tenant_passes_its_expensive_one_but_not_for_ever() -> None:
    """The line has the workers' order, or a short prompt would wait here behind what it would pass there; and their bound."""
    line: Line[str] = Line(10, TokenCounters())
    line.offer(one("long", cost=100.0), 0)
    passed = 0
    while True:
        line.offer(one("short", cost=10.0), 0)
        each = line.next(0)
        assert each is not None
        if each.item == "long":
            break
        passed += 1
    assert passed == 90 / AGING / 10


def test_tenants_take_turns_by_what_they_had() -> None:
    """Ten of one who came first don't all go before the one of another."""
    line: Line[str] = Line(100, TokenCounters())
    for number in range(10):
        line.offer(one(f"a{number}", "a", cost=10), 0)
    line.offer(one("b0", "b", cost=10), 0)
    assert order(line).index("b0") <= 1


def test_users_of_a_tenant_take_turns_within_its_share() -> None:
    """Ten dear ones and ten cheap ones of two users alternate by service, and both together get what another tenant gets."""
    users = TokenCounters()
    line: Line[str] = Line(100, TokenCounters(), users=users)
    for number in range(10):
        line.offer(replace(one(f"x{number}", "a", cost=10), user="x"), 0)
        line.offer(one(f"b{number}", "b", cost=10), 0)
    for number in range(20):
        line.offer(replace(one(f"y{number}", "a", cost=5), user="y"), 0)
    went = order(line)[:20]
    assert sum(item[0] == "b" for item in went) * 10 == pytest.approx(70, abs=10)
    spent = [sum(cost for item in went if item[0] == user) for user, cost in (("x", 10), ("y", 5))]
    assert abs(spent[0] - spent[1]) <= 2 * 10
    assert users.of("a\0x") == users.of("a\0y") == 100


def test_user_that_comes_later_has_no_credit_and_who_waits_again_goes_before_all_users() -> None:
    """What y didn't use while x was served is gone; who has had its turn in vain is of neither's account."""
    line: Line[str] = Line(100, TokenCounters())
    for number in range(8):
        line.offer(replace(one(f"x{number}", "a", cost=10), user="x"), 0)
    assert [line.next(0) is not None for _ in range(4)] == [True] * 4
    for number in range(4):
        line.offer(replace(one(f"y{number}", "a", cost=10), user="y"), 0)
    line.offer(replace(one("z", "a", cost=0), user="x", again=True), 0)
    went = order(line)
    assert went[0] == "z"
    assert sum(item[0] == "y" for item in went[1:5]) == 2
    assert line.waiting_of("a") == 0


def test_who_had_its_turn_in_vain_goes_first_of_its_tenant_and_keeps_its_place() -> None:
    """It may have begun to answer: newcomers stand behind it, and a full line sends one of them away, never it."""
    line: Line[str] = Line(2, TokenCounters())
    for item in "ab":
        assert line.offer(one(item), 0) is None
    for item in "xy":
        assert line.offer(replace(one(item), again=True), 0) is None
    assert (newest := line.offer(one("c"), 0)) is not None
    assert newest.item == "c"
    assert order(line) == ["x", "y", "a", "b"]
    line.offer(replace(one("z", priority=5), again=True), 0)
    line.offer(one("d"), 0)
    assert (newest := line.offer(one("e"), 0)) is not None
    assert newest.item == "e"
    assert order(line) == ["d", "z"]


def test_urgent_class_goes_first() -> None:
    """A lower number is more urgent."""
    line: Line[str] = Line(10, TokenCounters())
    line.offer(one("late", priority=1), 0)
    line.offer(one("soon", priority=0), 0)
    line.offer(one("now", priority=-1), 0)
    assert order(line) == ["now", "soon", "late"]


def test_less_urgent_class_does_not_starve() -> None:
    """While urgent requests never end, a class three steps behind still has one turn every three steps, and no more."""
    line: Line[str] = Line(10, TokenCounters())
    for number in range(5):
        line.offer(one(f"low{number}", priority=3), 0)
    turns = []
    step_ns = STEP_NS // 10
    for tick in range(100):
        now_ns = tick * step_ns
        line.offer(one("high", priority=0), now_ns)
        each = line.next(now_ns)
        assert each is not None
        if each.priority == 3:
            turns.append(tick)
        else:
            continue
        taken = line.next(now_ns)
        assert taken is not None
        assert taken.item == "high"
    gaps = [after - before for before, after in zip([0, *turns], turns, strict=False)]
    assert len(turns) == 3
    assert all(29 <= gap <= 32 for gap in gaps)


def test_full_line_refuses_the_newest_of_who_has_most() -> None:
    """A flood displaces itself; who asks little gets in."""
    line: Line[str] = Line(4, TokenCounters())
    for number in range(4):
        assert line.offer(one(f"flood{number}", "flood"), 0) is None
    refused = line.offer(one("flood4", "flood"), 0)
    assert refused is not None
    assert refused.item == "flood4"
    refused = line.offer(one("calm", "calm"), 0)
    assert refused is not None
    assert refused.item == "flood3"
    assert len(line) == 4
    assert line.waiting_of("calm") == 1


def test_full_line_lets_the_urgent_in() -> None:
    """The least urgent has to go, whoever's it is."""
    line: Line[str] = Line(2, TokenCounters())
    line.offer(one("low", "a", priority=5), 0)
    line.offer(one("mid", "b"), 0)
    refused = line.offer(one("high", "c", priority=-5), 0)
    assert refused is not None
    assert refused.item == "low"


def test_late_ones_are_taken_out() -> None:
    """Nobody is served whose deadline has passed while it waited."""
    line: Line[str] = Line(10, TokenCounters())
    line.offer(one("late", deadline_ns=5), 0)
    line.offer(one("good", deadline_ns=50), 0)
    assert [each.item for each in line.expired(5)] == ["late"]
    assert order(line) == ["good"]


def test_discarding_twice_changes_nothing() -> None:
    """A caller may hang up in the moment its turn comes."""
    line: Line[str] = Line(10, TokenCounters())
    first = one("a")
    line.offer(first, 0)
    assert line.discard(first)
    assert not line.discard(first)
    assert len(line) == 0


@pytest.mark.parametrize("seed", range(10))
def test_books_balance_whatever_happens(seed: int) -> None:
    """Every request leaves exactly once: served, displaced, discarded or late; the line never holds more than it may."""
    rng = random.Random(seed)
    line: Line[int] = Line(20, TokenCounters(max_tenants=5))
    inside: set[int] = set()
    known: dict[int, Waiting[int]] = {}
    for number in range(3000):
        now_ns = number * 10
        match rng.randrange(4):
            case 0 | 1:
                waits = Waiting(
                    item=number,
                    tenant=f"t{rng.randrange(8)}",
                    priority=rng.randrange(-2, 3),
                    cost=rng.random(),
                    deadline_ns=now_ns + rng.randrange(2000),
                )
                known[number] = waits
                inside.add(number)
                if (gone := line.offer(waits, now_ns)) is not None:
                    inside.remove(gone.item)
            case 2:
                if (gone := line.next(now_ns)) is not None:
                    inside.remove(gone.item)
            case 3:
                inside.difference_update(each.item for each in line.expired(now_ns))
                some = rng.randrange(number + 1)
                if some in known:
                    assert line.discard(known[some]) == (some in inside)
                    inside.discard(some)
        assert {each.item for each in line} == inside
        assert len(line) == len(inside) <= 20
