"""PrefixLru: what it adds to the contract of every policy."""

from contextlib import closing

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool.policy.eviction import Arrival, PrefixLru
from kvpool.testing.policy_kit import drain, insert_chain, key


def test_prefix_lru_chain_leaves_tail_first() -> None:
    """A head is useful without its tail, never the other way round."""
    policy = PrefixLru()
    insert_chain(policy, ["a", "b", "c", "d"])
    assert drain(policy, ["a", "b", "c", "d"]) == ["d", "c", "b", "a"]


def test_prefix_lru_touched_prefix_outlives_other_chains() -> None:
    """Hits on a shared prefix protect the prefix, not the forgotten tail behind it."""
    policy = PrefixLru()
    insert_chain(policy, ["a", "b", "c"])
    insert_chain(policy, ["x", "y"])
    for name in ("b", "a"):
        policy.touched(key(name), 1)
    assert drain(policy, ["a", "b", "c", "x", "y"]) == ["c", "y", "x", "b", "a"]


def test_prefix_lru_touch_in_either_order_keeps_tail_first() -> None:
    """Whether a reader walks head to tail or back, heads stay longer."""
    for order in (["a", "b", "c"], ["c", "b", "a"]):
        policy = PrefixLru()
        insert_chain(policy, ["a", "b", "c"])
        for name in order:
            policy.touched(key(name), 1)
        assert drain(policy, ["a", "b", "c"]) == ["c", "b", "a"]


def test_prefix_lru_hot_tail_keeps_its_cold_head() -> None:
    """A head nobody touches is needed as long as its tail is in use."""
    policy = PrefixLru()
    insert_chain(policy, ["a", "b"])
    insert_chain(policy, ["x"])
    policy.touched(key("b"), 1)
    assert drain(policy, ["a", "b", "x"], limit=1) == ["x"]
    assert drain(policy, ["a", "b", "x"]) == ["b", "a"]


def test_prefix_lru_head_of_two_tails_waits_for_both() -> None:
    """Two conversations share a prefix; the first one forgotten must not take it along."""
    policy = PrefixLru()
    insert_chain(policy, ["a", "b"])
    insert_chain(policy, ["c"], parent="a", depth=16)
    assert drain(policy, ["a", "b", "c"], leased={"c"}) == ["b"]
    assert drain(policy, ["a", "b", "c"]) == ["c", "a"]


def test_prefix_lru_leased_tail_protects_all_its_heads() -> None:
    """Nothing of a chain goes while a reader holds its tail."""
    policy = PrefixLru()
    insert_chain(policy, ["a", "b", "c"])
    assert drain(policy, ["a", "b", "c"], leased={"c"}) == []
    assert len(policy) == 3


def test_prefix_lru_parent_inserted_after_child_is_protected() -> None:
    """Commits may arrive out of order, and a discarded head may come back."""
    policy = PrefixLru()
    policy.inserted(Arrival(key("b"), key("a"), 16, 64), 0)
    policy.inserted(Arrival(key("a"), None, 0, 64), 0)
    assert drain(policy, ["a", "b"]) == ["b", "a"]


def test_prefix_lru_orphan_outlives_its_discarded_parent() -> None:
    """A discard may take a head away from its tail; the tail stays evictable and the returning head is protected again."""
    policy = PrefixLru()
    insert_chain(policy, ["a", "b"])
    policy.removed(key("a"))
    policy.inserted(Arrival(key("a"), None, 0, 64), 0)
    assert drain(policy, ["a", "b"]) == ["b", "a"]
    assert len(policy) == 0


def test_prefix_lru_circular_claims_stay_evictable() -> None:
    """A confused writer must not be able to make bytes unreclaimable."""
    policy = PrefixLru()
    policy.inserted(Arrival(key("a"), key("b"), 16, 64), 0)
    policy.inserted(Arrival(key("b"), key("a"), 16, 64), 0)
    policy.inserted(Arrival(key("c"), key("d"), 16, 64), 0)
    policy.inserted(Arrival(key("d"), key("c"), 32, 64), 0)
    assert sorted(drain(policy, ["a", "b", "c", "d"])) == ["a", "b", "c", "d"]


def test_prefix_lru_eviction_in_small_steps_costs_constant_work() -> None:
    """Each block is parked at most once per insert or touch, however often room is made."""
    policy = PrefixLru()
    names = [f"n{i}" for i in range(600)]
    insert_chain(policy, names)
    gone = [drain(policy, names, limit=1)[0] for _ in names]
    assert gone == names[::-1]


TREE = {"a": None, "b": "a", "c": "b", "d": "b", "e": "a", "x": None, "y": "x", "z": "y"}
DEPTH = {"a": 0, "b": 16, "c": 32, "d": 32, "e": 16, "x": 0, "y": 16, "z": 32}


def lineage(name: str) -> list[str]:
    """`name`, its parent, ... up to the root: tail first."""
    line = [name]
    while (parent := TREE[line[-1]]) is not None:
        line.append(parent)
    return line


@given(st.lists(st.tuples(st.sampled_from("iterv"), st.sampled_from(sorted(TREE)), st.sampled_from(sorted(TREE)))))
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
def test_prefix_lru_any_history_never_offers_a_needed_block(history: list[tuple[str, str, str]]) -> None:
    """Whatever happened before, no victim has a resident child, and everything unleased without leased tail can go."""
    policy, resident = PrefixLru(), set[str]()
    for action, name, leased in history:
        if action == "i" and name not in resident:
            parent = TREE[name]
            policy.inserted(Arrival(key(name), None if parent is None else key(parent), DEPTH[name], 64), 0)
            resident.add(name)
        elif action == "t":
            policy.touched(key(name), 0)
        elif action == "r":
            policy.removed(key(name))
            resident.discard(name)
        elif action in "ev":
            with closing(policy.victims()) as victims:
                for victim in victims:
                    found = next(n for n in resident if key(n) == victim)
                    assert not [n for n in resident if TREE[n] == found]
                    if found != leased:
                        policy.removed(victim)
                        resident.discard(found)
                        if action == "e":
                            break
            if action == "v":
                kept = set[str]()
                if leased in resident:
                    line = lineage(leased)
                    for n in line:
                        if n not in resident:
                            break
                        kept.add(n)
                assert resident == kept
        assert len(policy) == len(resident)


@given(st.lists(st.sampled_from(sorted(TREE)), max_size=30), st.integers(0, 8))
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
def test_prefix_lru_whole_prefix_touches_equal_exact_lru_of_leaves(touches: list[str], evictions: int) -> None:
    """Readers touch prefixes; for such histories the queue is exact: always the least recently used leaf."""
    policy, used = PrefixLru(), dict[str, int]()
    for name in sorted(TREE, key=lambda n: -DEPTH[n]):
        parent = TREE[name]
        policy.inserted(Arrival(key(name), None if parent is None else key(parent), DEPTH[name], 64), 0)
        used[name] = len(used)
    for step, name in enumerate(touches):
        for index, member in enumerate(lineage(name)):
            policy.touched(key(member), step)
            used[member] = 100 * (step + 1) + index
    expected = []
    for _ in range(evictions):
        leaf = min((n for n in used if not any(TREE[m] == n for m in used)), key=lambda n: used[n])
        expected.append(leaf)
        del used[leaf]
    assert (drain(policy, sorted(TREE), limit=evictions) if evictions else []) == expected
