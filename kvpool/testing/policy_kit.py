"""The contract of an eviction policy, as tests: subclass `PolicyKit` and say how to `make` one.

The kit compares a policy with a plain set of resident blocks. It knows one freedom: a policy may hold back a block while a
resident descendant of it can't go, and must offer everything else. `machine` is the same as a stateful test for hypothesis,
`churn` and `footprint` are for long runs.
"""

import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import closing
from hashlib import sha256
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvpool.block import BlockKey
from kvpool.errors import LocalError
from kvpool.policy.eviction import DEFAULT_PRIORITY, NEVER_NS, Arrival, EvictionPolicy

TREE: Mapping[str, str | None] = {"a": None, "b": "a", "c": "b", "d": "b", "e": "a", "x": None, "y": "x", "z": "y", "q": None}
"""Some blocks and their parents: two chains that fork, one straight chain, a single block."""


def key(name: str) -> BlockKey:
    """The key of the block called `name`."""
    return BlockKey(sha256(name.encode()).digest())


def lineage(name: str) -> list[str]:
    """`name` of `TREE`, its parent and so on up to the root: tail first."""
    line = [name]
    while (parent := TREE[line[-1]]) is not None:
        line.append(parent)
    return line


def arrival(name: str, **others: Any) -> Arrival:
    """The arrival of a block of `TREE`, 16 tokens a block."""
    line = lineage(name)
    return Arrival(key(name), key(line[1]) if line[1:] else None, 16 * (len(line) - 1), **{"length": 64, **others})


def insert_chain(
    policy: EvictionPolicy, names: Sequence[str], *, parent: str | None = None, depth: int = 0, now_ns: int = 0, **others: Any
) -> None:
    """Insert a chain of 16-token blocks one by one, head first, below `parent`."""
    for index, name in enumerate(names):
        above = None if parent is None else key(parent)
        policy.inserted(Arrival(key(name), above, depth + 16 * index, **{"length": 64, **others}), now_ns)
        parent = name


def drain(policy: EvictionPolicy, names: Sequence[str], *, leased: Collection[str] = (), limit: int = 1 << 30) -> list[str]:
    """Evict up to `limit` blocks, passing over `leased`; their names in order. `names`: all that may come."""
    by_key = {key(name): name for name in names}
    gone: list[str] = []
    with closing(policy.victims()) as victims:
        for victim in victims:
            if by_key[victim] in leased:
                continue
            policy.removed(victim)
            gone.append(by_key[victim])
            if len(gone) == limit:
                break
    return gone


def look(policy: EvictionPolicy) -> list[BlockKey]:
    """All candidates in order; takes none."""
    with closing(policy.victims()) as victims:
        return list(victims)


def _random_arrival(name: str, choice: Random, now_ns: int) -> Arrival:
    return arrival(
        name,
        length=choice.choice([64, 64, 640, 4096]),
        sequence=choice.choice([0, 64, 200]),
        priority=choice.choice([0, DEFAULT_PRIORITY, 100]),
        priority_until_ns=choice.choice([NEVER_NS, now_ns, now_ns + 5]),
        expires_ns=choice.choice([NEVER_NS, now_ns + 9]),
    )


def history(policy: EvictionPolicy, seed: int, steps: int = 300) -> Iterator[list[BlockKey]]:
    """Feed a random history; yields what left at each step that made room."""
    choice, names = Random(seed), sorted(TREE)
    for now_ns in range(steps):
        name = choice.choice(names)
        if key(name) not in policy:
            policy.inserted(_random_arrival(name, choice, now_ns), now_ns)
        elif choice.random() < 0.6:
            policy.touched(key(name), now_ns, choice.choice([0, 64, 200]))
        if len(policy) > 6:
            leased, gone = choice.sample(names, 2), list[BlockKey]()
            with closing(policy.victims()) as victims:
                for victim in victims:
                    if victim not in map(key, leased):
                        policy.removed(victim)
                        gone.append(victim)
                        if len(gone) == 2:
                            break
            yield gone


def machine(make: Callable[[], EvictionPolicy], *, repeats: bool = True) -> type[RuleBasedStateMachine]:
    """A stateful test of the policy against a set. `repeats`: see `PolicyKit.repeats`."""
    names = st.sampled_from(sorted(TREE))

    class PolicyMachine(RuleBasedStateMachine):
        @initialize()
        def start(self) -> None:
            self.policy, self.resident, self.now_ns = make(), set[str](), 0

        @rule(name=names, seed=st.integers(0, 1 << 16), later=st.integers(0, 6))
        def insert(self, name: str, seed: int, later: int) -> None:
            self.now_ns += later
            if name not in self.resident:
                self.policy.inserted(_random_arrival(name, Random(seed), self.now_ns), self.now_ns)
                self.resident.add(name)

        @rule(name=names, later=st.integers(0, 6), sequence=st.sampled_from([0, 16, 80, 1000]))
        def touch(self, name: str, later: int, sequence: int) -> None:
            self.now_ns += later
            for member in lineage(name):
                self.policy.touched(key(member), self.now_ns, sequence)

        @rule(name=names)
        def remove(self, name: str) -> None:
            self.policy.removed(key(name))
            self.resident.discard(name)

        @rule(leased=st.frozensets(names, max_size=3), limit=st.integers(1, len(TREE)))
        def make_room(self, leased: frozenset[str], limit: int) -> None:
            by_key = {key(name): name for name in TREE}
            offered, gone = set[str](), 0
            with closing(self.policy.victims()) as victims:
                for victim in victims:
                    name = by_key[victim]
                    assert name in self.resident, f"{name} was offered, but isn't here"
                    assert name not in offered, f"{name} was offered twice"
                    offered.add(name)
                    if name not in leased:
                        self.policy.removed(victim)
                        self.resident.discard(name)
                        gone += 1
                        if gone == limit:
                            return
            held = {above for name in leased & self.resident for above in lineage(name)}
            assert self.resident <= held, "something that could go was never offered"

        @rule()
        def look_around(self) -> None:
            look(self.policy)
            if repeats:
                assert look(self.policy) == look(self.policy)

        @invariant()
        def members_agree(self) -> None:
            assert len(self.policy) == len(self.resident)
            assert all((key(name) in self.policy) == (name in self.resident) for name in TREE)

    return PolicyMachine


class PolicyKit:
    """Subclass it as `Test...` and override `make`."""

    warm = 5_000
    """Blocks that fill what the policy keeps of a constant size (ghosts, samples), whatever it holds."""
    repeats = True
    """Whether two walks with nothing between them offer the same, once a first walk has done the moves that were due."""

    def make(self) -> EvictionPolicy:
        """A fresh policy."""
        raise LookupError("override make()")

    def test_every_block_is_offered_exactly_once(self) -> None:
        """Bytes that a policy forgets can never be reclaimed."""
        policy = self.make()
        insert_chain(policy, ["a", "b", "c"])
        insert_chain(policy, ["x", "y"], parent="b", depth=32)
        assert sorted(drain(policy, ["a", "b", "c", "x", "y"])) == ["a", "b", "c", "x", "y"]
        assert (len(policy), look(policy)) == (0, [])

    def test_block_passed_over_is_offered_again_next_time(self) -> None:
        """A leased block is passed over today and must be found once its lease has ended."""
        policy = self.make()
        insert_chain(policy, ["a"])
        insert_chain(policy, ["b"])
        assert drain(policy, ["a", "b"], leased={"a"}) == ["b"]
        assert drain(policy, ["a", "b"]) == ["a"]

    def test_more_blocks_than_one_snapshot_all_come_and_keep_their_order(self) -> None:
        """Walks look at the order in portions; nothing may fall between two of them."""
        policy, names = self.make(), [f"n{i}" for i in range(500)]
        for name in names:
            insert_chain(policy, [name])
        for name in names[::3]:
            policy.touched(key(name), 1)
        before = look(policy)
        assert sorted(before) == sorted(map(key, names))
        if self.repeats:
            leased = set(names[::2])
            assert look(policy) == before
            gone = drain(policy, names, leased=leased)
            assert gone == [name for k in before for name in [names[_index(names, k)]] if name not in leased]
            assert look(policy) == [k for k in before if names[_index(names, k)] in leased]

    def test_walk_left_early_forgets_nothing(self) -> None:
        """Making room stops at the first victim that suffices."""
        policy, names = self.make(), [f"n{i}" for i in range(40)]
        for name in names:
            insert_chain(policy, [name])
        for _ in range(3):
            drain(policy, names, leased=set(names[:30]), limit=2)
        assert len(look(policy)) == len(policy) == 34

    def test_unknown_keys_are_ignored(self) -> None:
        """A reader's touch may come after the eviction."""
        policy = self.make()
        insert_chain(policy, ["a", "b"])
        policy.removed(key("a"))
        policy.removed(key("a"))
        policy.removed(key("never there"))
        policy.touched(key("never there"), 1)
        policy.touched(key("a"), 1, 100)
        assert (key("a") in policy, key("b") in policy, len(policy)) == (False, True, 1)
        assert look(policy) == [key("b")]

    def test_second_insert_is_refused(self) -> None:
        """Two entries for one key would offer a block that is already gone."""
        policy = self.make()
        insert_chain(policy, ["a"])
        with pytest.raises(LocalError, match="twice"):
            insert_chain(policy, ["a"])
        assert drain(policy, ["a"]) == ["a"]

    def test_keys_may_be_any_hashable(self) -> None:
        """A replay names blocks by number."""
        policy, numbers = self.make(), [BlockKey(_as_bytes(i)) for i in range(30)]
        for i, number in enumerate(numbers):
            policy.inserted(Arrival(number, numbers[i - 1] if i else None, 16 * i, 64), i)
            policy.touched(number, i)
        assert sorted(look_and_take(policy)) == sorted(numbers)
        policy.inserted(Arrival(numbers[0], None, 0, 64), 1)
        with pytest.raises(LocalError, match="twice"):
            policy.inserted(Arrival(numbers[0], None, 0, 64), 1)

    def test_same_history_gives_the_same_victims(self) -> None:
        """A simulated failure must replay from its seed."""
        assert [*history(self.make(), 5)] == [*history(self.make(), 5)] != []

    def test_memory_does_not_grow_with_what_passed_by(self) -> None:
        """A node lives for months; what it keeps per resident block is all it may keep."""
        policy = self.make()
        small = churn(policy, self.warm)
        assert churn(policy, 30_000, first=self.warm) < 1.5 * small

    def test_any_history_against_a_set(self) -> None:
        """Whatever happened before: no stranger, nobody twice, nobody forgotten."""
        quick = settings(deadline=None, max_examples=40, stateful_step_count=40, suppress_health_check=list(HealthCheck))
        run_state_machine_as_test(machine(self.make, repeats=self.repeats), settings=quick)


def _as_bytes(number: int) -> Any:
    return number


def _index(names: Sequence[str], wanted: BlockKey) -> int:
    return next(i for i, name in enumerate(names) if key(name) == wanted)


def look_and_take(policy: EvictionPolicy) -> list[BlockKey]:
    """All candidates in order; takes every one."""
    gone = []
    with closing(policy.victims()) as victims:
        for victim in victims:
            policy.removed(victim)
            gone.append(victim)
    return gone


def churn(policy: EvictionPolicy, blocks: int, *, first: int = 0, capacity: int = 200) -> int:
    """Let `blocks` new ones pass through a store of `capacity`, some used again, some discarded; the policy's bytes then."""
    choice = Random(first)
    recent = [key("0")] * capacity
    for number in range(first, first + blocks):
        while len(policy) >= capacity:
            with closing(policy.victims()) as victims:
                policy.removed(next(victims))
        fresh = key(str(number))
        parent = recent[(number - 1) % capacity] if number % 8 else None
        policy.inserted(Arrival(fresh, parent, number % 8 * 16, 64, 128, number % 3 * 50, number + 100, number + 300), number)
        recent[number % capacity] = fresh
        for _ in range(choice.randrange(3)):
            policy.touched(recent[choice.randrange(capacity)], number, 128)
        if number % 50 == 0:
            policy.removed(recent[choice.randrange(capacity)])
    return footprint(policy)


def footprint(thing: object, *, besides: Collection[int] = ()) -> int:
    """Bytes that `thing` and everything in it take, shared parts once. Keys count, as the policy may be the last to hold them."""
    seen, stack, total = set(besides), [thing], 0
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, type):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        if isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            stack += item
        elif not isinstance(item, Hashable) or not isinstance(item, int | str | bytes | float):
            for part in type(item).__mro__:
                slots = getattr(part, "__slots__", ())
                stack += [getattr(item, name) for name in slots if hasattr(item, name)]
            stack += vars(item).values() if hasattr(item, "__dict__") else ()
    return total
