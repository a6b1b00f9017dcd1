"""Virtual token counters: fair shares, whatever tenants send."""

import random

from kvpool.policy.admission.fairness import ANSWER, PROMPT, TokenCounters
from kvpool.policy.admission.line import Line, Waiting

FAR_NS = 1 << 60


def test_tenant_that_rested_has_no_credit() -> None:
    """What it didn't use then must not hold the others back now."""
    counters = TokenCounters()
    counters.arrived("busy", ())
    counters.charge("busy", 1000)
    counters.arrived("rested", ["busy"])
    assert counters.of("rested") == 1000


def test_tenant_that_had_more_keeps_its_counter() -> None:
    """Leaving the line for a moment doesn't wash a counter clean."""
    counters = TokenCounters()
    counters.charge("greedy", 5000)
    counters.charge("modest", 10)
    counters.arrived("greedy", ["modest"])
    assert counters.of("greedy") == 5000


def test_nobody_waits_so_the_last_one_served_sets_the_mark() -> None:
    """A newcomer to an idle cluster begins where the service is, not at zero."""
    counters = TokenCounters()
    counters.charge("a", 300)
    counters.served("a")
    counters.arrived("new", ())
    assert counters.of("new") == 300


def test_counters_are_bounded() -> None:
    """Names come from outside: who changed longest ago is forgotten."""
    counters = TokenCounters(max_tenants=3)
    for number in range(10):
        counters.charge(f"t{number}", 1)
    assert len(counters) == 3
    assert counters.of("t9") == 1


def test_two_tenants_that_always_wait_stay_within_the_bound_of_the_paper() -> None:
    """Theorem 4.4: |W_a - W_b| <= 2 max(PROMPT x L, ANSWER x M), for random sizes, when one sends nine times as much as the other."""
    for seed in range(20):
        rng = random.Random(seed)
        counters = TokenCounters()
        line: Line[tuple[str, int]] = Line(1 << 12, counters)
        largest_prompt, largest_answer, places = 400, 100, 4
        for turn in range(2000):
            tenant = "flood" if turn % 10 else "calm"
            prompt = rng.randint(1, largest_prompt)
            line.offer(Waiting(item=(tenant, prompt), tenant=tenant, cost=PROMPT * prompt, deadline_ns=FAR_NS), turn)
        service = {"flood": 0.0, "calm": 0.0}
        running: list[tuple[str, int]] = []
        worst = 0.0
        while line.waiting_of("flood") and line.waiting_of("calm"):
            while len(running) < places:
                one = line.next(5000)
                assert one is not None
                service[one.tenant] += one.cost
                running.append((one.tenant, rng.randint(1, largest_answer)))
            for tenant, _ in running:
                counters.charge(tenant, ANSWER)
                service[tenant] += ANSWER
            running = [(tenant, left - 1) for tenant, left in running if left > 1]
            if line.waiting_of("flood") and line.waiting_of("calm"):
                worst = max(worst, abs(service["flood"] - service["calm"]))
        bound = 2 * max(PROMPT * largest_prompt, ANSWER * places * largest_answer)
        assert service["calm"] > 5 * bound, "the run is too short to say anything"
        assert worst <= bound
