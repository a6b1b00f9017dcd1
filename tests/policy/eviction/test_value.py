"""ReuseValue: what it learns, and what it never does whatever it learns. The contract is tested in test_contract.py."""

import os
import subprocess
import sys
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

from kvpool.block import BlockKey
from kvpool.policy.eviction import Arrival
from kvpool.policy.eviction.reuse import BINS, EDGES_NS, ReuseHazard, bin_of, gittins
from kvpool.policy.eviction.value import ReuseValue
from kvpool.units import SECOND

ROOT = Path(__file__).parents[3]
TOKENS = 512


def keys(name: str, count: int) -> list[BlockKey]:
    return [BlockKey(sha256(f"{name}/{i}".encode()).digest()) for i in range(count)]


def use(policy: ReuseValue, chain: list[BlockKey], now_ns: int) -> None:
    """A request for a whole chain, as the node tells it: hits first, then what was written; tails first."""
    sequence = len(chain) * TOKENS
    missing = next((i for i, key in enumerate(chain) if key not in policy), len(chain))
    for key in reversed(chain[:missing]):
        policy.touched(key, now_ns, sequence)
    for i in reversed(range(missing, len(chain))):
        if chain[i] not in policy:
            policy.inserted(Arrival(chain[i], chain[i - 1] if i else None, i * TOKENS, 1000, sequence), now_ns)


def evict(policy: ReuseValue, down_to: int) -> list[BlockKey]:
    gone: list[BlockKey] = []
    victims = policy.victims()
    while len(policy) > down_to:
        key = next(victims)
        policy.removed(key)
        gone.append(key)
    victims.close()
    return gone


def test_conversations_that_come_back_are_kept_before_documents_that_do_not() -> None:
    """Learnt, not told: short prompts return after ten seconds, long ones never, and both were used at the same time."""
    policy = ReuseValue()
    for turn in range(58):
        now_ns = turn * 10 * SECOND
        for user in range(4):
            use(policy, keys(f"chat{turn // 6}-{user}", 2 + turn % 6), now_ns + user)
        use(policy, keys(f"document{turn}", 20), now_ns + 9)
        evict(policy, 60)
    evict(policy, 32)
    chats = [key for user in range(4) for key in keys(f"chat9-{user}", 5)]
    assert sum(key in policy for key in chats) == 20
    assert sum(key in policy for key in keys("document57", 20)) <= 12


def test_tails_leave_before_heads() -> None:
    """A block is useful only with all of its ancestors, whatever else it is worth."""
    policy = ReuseValue()
    parents: dict[BlockKey, BlockKey | None] = {}
    for number in range(12):
        chain = [*keys("system", 3), *keys(f"c{number}", 1 + number % 5)]
        parents.update(zip(chain, [None, *chain], strict=False))
        use(policy, chain, number * SECOND)
    for key in evict(policy, 0):
        assert not [child for child, parent in parents.items() if parent == key and child in policy]


def test_left_behind_branch_leaves_before_the_conversation_that_went_on() -> None:
    """After an edit of the last question, the answer to the old one is dead."""
    policy = ReuseValue()
    base = keys("base", 6)
    use(policy, [*base, *keys("first", 2)], SECOND)
    use(policy, [*base, *keys("second", 2)], 2 * SECOND)
    gone = evict(policy, 8)
    assert set(gone) == set(keys("first", 2))


def test_priority_scales_the_value() -> None:
    """Ten points are a factor of two, until the priority ends."""
    policy = ReuseValue()
    for name, priority in (("a", 50), ("b", 90), ("c", 10)):
        policy.inserted(Arrival(keys(name, 1)[0], None, 0, 1000, TOKENS, priority, 100 * SECOND), SECOND)
    assert evict(policy, 0) == [keys(name, 1)[0] for name in "cab"]


def test_hazard_of_what_returns_at_one_age_is_seen_at_that_age() -> None:
    """Think time: nothing for four seconds, then all of it."""
    hazard = ReuseHazard()
    cls = hazard.cls((1, 1))
    for number in range(400):
        now_ns = number * SECOND
        hazard.follow(number, now_ns, cls)
        hazard.used(number - 5, now_ns)
        hazard.advance(now_ns)
    hazard.refresh(256, 0.0)
    assert hazard.index(cls, bin_of(5 * SECOND)) > 2 * hazard.index(cls, bin_of(SECOND))
    assert hazard.index(cls, bin_of(2 * SECOND)) > hazard.index(cls, bin_of(20 * SECOND))


def test_a_use_counts_with_those_that_waited_as_long() -> None:
    """Else the oldest age seen so far looks as if every block came back there."""
    hazard = ReuseHazard()
    cls = hazard.cls((1, 1))
    for number in range(400):
        hazard.follow(number, 0, cls)
    for number in range(20):
        hazard.used(number, 60 * SECOND)
    found = []
    for now_s in (62, 70):
        hazard.advance(now_s * SECOND)
        hazard.refresh(1, 0.0)
        found.append(hazard.index(cls, bin_of(60 * SECOND)))
    assert found[0] < 2 * found[1]
    assert 0.02 < found[1] * 20 < 0.08


def test_index_is_the_best_ratio_over_all_horizons() -> None:
    """Against trying every horizon."""
    hazard = [0.001 * (1 + (7 * b) % 11) for b in range(BINS)]
    widths = [EDGES_NS[0] / 1e9, *[(b - a) / 1e9 for a, b in pairwise(EDGES_NS)], EDGES_NS[-1] / 1e9]
    for start, index in enumerate(gittins(hazard)):
        best = chance = seconds = 0.0
        alive = 1.0
        for b in range(start, BINS):
            chance += alive * hazard[b]
            seconds += alive * widths[b] * (1 - hazard[b] / 2)
            alive *= 1 - hazard[b]
            best = max(best, chance / seconds)
        assert abs(index - best) <= 1e-9 * best


SCRIPT = """
import sys
sys.path.insert(0, "tests/policy/eviction")
from test_value import ReuseValue, evict, keys, use
policy, out = ReuseValue(), []
for step in range(400):
    use(policy, keys(f"u{step * 7 % 23}", 1 + step % 9), step * 10**9)
    out += evict(policy, 60)
from hashlib import sha256
print(sha256(b"".join(out)).hexdigest())
"""


def test_order_is_the_same_under_two_hash_seeds() -> None:
    """A trace replays to the same figure anywhere."""
    digests = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
