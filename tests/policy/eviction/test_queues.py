"""LRU, CLOCK, S3-FIFO, LFU and SLRU: the order each is named for, and against a plain model on random histories."""

from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import closing
from random import Random

import pytest

from kvpool.block import BlockKey
from kvpool.policy.eviction import Arrival, EvictionPolicy, make_policy
from kvpool.testing.policy_kit import churn, drain, insert_chain, key, look

NAMES = list("abcdefghij")


def filled(name: str, names: str = "abcdefghij") -> EvictionPolicy:
    """A policy that got `names` as single blocks, one by one."""
    policy = make_policy(name)
    for block in names:
        insert_chain(policy, [block])
    return policy


def touch(policy: EvictionPolicy, names: str) -> None:
    for block in names:
        policy.touched(key(block), 1)


def order(policy: EvictionPolicy) -> str:
    by_key = {key(name): name for name in NAMES}
    return "".join(by_key[k] for k in look(policy))


def test_lru_use_moves_a_block_to_the_young_end() -> None:
    """That is all there is to it."""
    policy = filled("lru", "abcd")
    touch(policy, "ca")
    assert order(policy) == "bdca"


def test_clock_use_gives_one_second_chance_only() -> None:
    """A mark saves a block once, however often it was used; then it is the youngest unmarked one."""
    policy = filled("clock", "abcd")
    touch(policy, "aaab")
    assert drain(policy, NAMES, limit=1) == ["c"]
    assert order(policy) == "dab"


def test_clock_leased_block_stays_under_the_hand() -> None:
    """The hand must find a block again that it passed over for its lease."""
    policy = filled("clock", "abcd")
    touch(policy, "b")
    assert drain(policy, NAMES, leased={"a"}, limit=1) == ["c"]
    assert order(policy) == "adb"


def test_lfu_fewest_uses_leave_first_and_the_older_of_equals() -> None:
    """Frequency decides, recency breaks ties."""
    policy = filled("lfu", "abcd")
    touch(policy, "bbac")
    assert order(policy) == "dacb"


def test_lfu_count_dies_with_the_block() -> None:
    """A block that comes back starts anew, else counts of absent blocks would pile up."""
    policy = filled("lfu", "ab")
    touch(policy, "aaa")
    policy.removed(key("a"))
    insert_chain(policy, ["a"])
    touch(policy, "b")
    assert order(policy) == "ab"


def test_slru_one_pass_of_new_blocks_leaves_used_ones_alone() -> None:
    """Scan resistance is what the segments are for."""
    policy = filled("slru", "abcd")
    touch(policy, "ba")
    for name in "efgh":
        insert_chain(policy, [name])
    assert order(policy) == "cdefghba"


def test_slru_protected_overflow_falls_back_to_trial() -> None:
    """Four fifths may be protected; the oldest of more is on trial again, as the youngest there."""
    policy = filled("slru", "abcde")
    touch(policy, "abcde")
    assert order(policy) == "abcde"
    touch(policy, "a")
    assert order(policy) == "bcdea"


def test_slru_share_counts_bytes() -> None:
    """One large block may not protect itself by counting as one."""
    policy = make_policy("slru")
    insert_chain(policy, ["a"], length=9000)
    insert_chain(policy, ["b"], length=1000)
    touch(policy, "a")
    assert order(policy) == "ba"
    touch(policy, "b")
    assert order(policy) == "ab"


def test_s3fifo_unused_blocks_go_before_one_that_was_used() -> None:
    """One-hit wonders make room; one use is enough to be none."""
    policy = filled("s3fifo")
    touch(policy, "a")
    assert drain(policy, NAMES, limit=9) == list("bcdefghij")
    assert order(policy) == "a"


def test_s3fifo_ghost_comes_back_to_the_main_queue() -> None:
    """A block thrown out too early is recognised when it returns."""
    policy = filled("s3fifo")
    assert drain(policy, NAMES, limit=1) == ["a"]
    insert_chain(policy, ["a"])
    assert drain(policy, NAMES, limit=8) == list("bcdefghi")
    assert order(policy) == "ja"


def test_s3fifo_discarded_block_leaves_no_ghost() -> None:
    """A corrupt block that was discarded says nothing about the queue being too short."""
    policy = filled("s3fifo")
    policy.removed(key("a"))
    insert_chain(policy, ["a"])
    assert order(policy) == "bcdefghija"


def test_s3fifo_main_queue_gives_a_chance_per_use() -> None:
    """A main block that was used goes round again."""
    policy = filled("s3fifo")
    touch(policy, "abc")
    assert drain(policy, NAMES, limit=7) == list("defghij")
    touch(policy, "a")
    assert order(policy) == "bca"


def test_s3fifo_ghosts_are_bounded_by_the_residents() -> None:
    """Keys of what is gone may not outnumber what is here."""
    policy = make_policy("s3fifo")
    churn(policy, 3000, capacity=100)
    assert len(policy._ghosts) <= 101  # type: ignore[attr-defined]


# Independent models: what a request sequence hits, 20 lines each.


def model_lru(requests: list[int], capacity: int) -> list[bool]:
    queue, hits = OrderedDict[int, None](), []
    for item in requests:
        hits.append(item in queue)
        queue[item] = None
        queue.move_to_end(item)
        if len(queue) > capacity:
            queue.popitem(last=False)
    return hits


def model_clock(requests: list[int], capacity: int) -> list[bool]:
    ring, marks, hand, hits = list[int](), dict[int, bool](), 0, []
    for item in requests:
        hits.append(item in marks)
        if item in marks:
            marks[item] = True
        elif len(ring) < capacity:
            ring.append(item)
            marks[item] = False
        else:
            while marks[ring[hand]]:
                marks[ring[hand]] = False
                hand = (hand + 1) % capacity
            del marks[ring[hand]]
            ring[hand], marks[item] = item, False
            hand = (hand + 1) % capacity
    return hits


def model_s3fifo(requests: list[int], capacity: int) -> list[bool]:
    small, main, ghosts = deque[int](), deque[int](), deque[int]()
    uses, hits = dict[int, int](), []
    for item in requests:
        hits.append(item in uses)
        if item in uses:
            uses[item] = min(3, uses[item] + 1)
            continue
        while len(uses) >= capacity:
            if small and (len(small) * 10 >= len(uses) or not main):
                oldest = small.popleft()
                if uses[oldest]:
                    uses[oldest] = 0
                    main.append(oldest)
                else:
                    del uses[oldest]
                    ghosts.append(oldest)
                    while len(ghosts) > len(uses) + 1:
                        ghosts.popleft()
            else:
                oldest = main.popleft()
                if uses[oldest]:
                    uses[oldest] -= 1
                    main.append(oldest)
                else:
                    del uses[oldest]
        if item in ghosts:
            ghosts.remove(item)
            main.append(item)
        else:
            small.append(item)
        uses[item] = 0
    return hits


def model_lfu(requests: list[int], capacity: int) -> list[bool]:
    uses, last, hits = dict[int, int](), dict[int, int](), []
    for now, item in enumerate(requests):
        hits.append(item in uses)
        if item not in uses and len(uses) == capacity:
            del uses[min(uses, key=lambda i: (uses[i], last[i]))]
        uses[item], last[item] = uses.get(item, 0) + 1, now
    return hits


def model_slru(requests: list[int], capacity: int) -> list[bool]:
    trial, protected, hits = list[int](), list[int](), []
    for item in requests:
        held = item in trial or item in protected
        hits.append(held)
        if not held:
            if len(trial) + len(protected) == capacity:
                (trial or protected).pop(0)
            trial.append(item)
            continue
        (trial if item in trial else protected).remove(item)
        protected.append(item)
        while len(protected) * 5 > (len(trial) + len(protected)) * 4:
            trial.append(protected.pop(0))
    return hits


def replay(name: str, requests: list[int], capacity: int) -> list[bool]:
    policy, hits = make_policy(name), []
    for now, item in enumerate(requests):
        block = BlockKey(item.to_bytes(4, "big"))
        hits.append(block in policy)
        if block in policy:
            policy.touched(block, now)
            continue
        if len(policy) == capacity:
            with closing(policy.victims()) as victims:
                policy.removed(next(victims))
        policy.inserted(Arrival(block, None, 0, 64), now)
    return hits


@pytest.mark.parametrize("model", [model_lru, model_clock, model_s3fifo, model_lfu, model_slru], ids=lambda m: m.__name__)
def test_policy_hits_what_an_independent_model_hits(model: Callable[[list[int], int], list[bool]]) -> None:
    """The textbook algorithm, written a second time without the contract around it, request for request."""
    choice = Random(8)
    for capacity in (1, 2, 7, 40):
        for skew in (1.0, 2.5):
            requests = [int(120 * choice.random() ** skew) for _ in range(1500)]
            assert replay(model.__name__.removeprefix("model_"), requests, capacity) == model(requests, capacity)
