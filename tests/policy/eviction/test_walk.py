"""Walking queues and rankings while the caller takes blocks out."""

from collections import OrderedDict
from contextlib import closing

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.block import BlockKey
from kvpool.policy.eviction.walk import Ranked, in_order

Keys = list[BlockKey]


def keys(*numbers: int) -> Keys:
    return [BlockKey(number.to_bytes(2, "big")) for number in numbers]


@given(st.integers(0, 120), st.sets(st.integers(0, 119)), st.integers(0, 120))
@settings(deadline=None, max_examples=100)
def test_in_order_whatever_is_taken_out_yields_each_key_once_in_order(size: int, kept: set[int], stop: int) -> None:
    """Snapshots of the queue must fit together wherever their borders fall."""
    everything = keys(*range(size))
    queue = OrderedDict.fromkeys(everything)
    seen: Keys = []
    with closing(in_order(queue)) as walk:
        for key in walk:
            seen.append(key)
            if int.from_bytes(key, "big") not in kept:
                del queue[key]
            if len(seen) == stop:
                break
    assert seen == everything[: stop or None]
    assert list(queue) == [key for key in everything if key not in seen or int.from_bytes(key, "big") in kept]


@given(st.lists(st.tuples(st.sampled_from("sdw"), st.integers(0, 9), st.integers(0, 5))))
@settings(deadline=None, max_examples=200)
def test_ranked_any_history_walks_in_order_of_rank(steps: list[tuple[str, int, int]]) -> None:
    """Outdated heap entries must neither show up nor hide live ones."""
    ranked, model = Ranked(), dict[BlockKey, tuple[int, ...]]()
    for tick, (action, number, level) in enumerate(steps):
        (key,) = keys(number)
        if action == "s":
            ranked.set(key, (level, tick))
            ranked.set(key, (level, tick))
            model[key] = (level, tick)
        elif action == "d":
            ranked.drop(key)
            model.pop(key, None)
        else:
            expected = sorted(model, key=lambda k: model[k])
            seen = []
            with closing(ranked.in_order()) as walk:
                for key in walk:
                    seen.append(key)
                    if len(seen) % 2:
                        ranked.drop(key)
                        del model[key]
            assert seen == expected
        assert (len(ranked), ranked.get(key)) == (len(model), model.get(key))
        assert ranked.first() == min(((rank, key) for key, rank in model.items()), default=None)


def test_ranked_heap_stays_within_twice_the_live_keys() -> None:
    """A block that is used a million times takes no more room than one that isn't."""
    ranked = Ranked()
    for tick in range(10_000):
        ranked.set(keys(tick % 10)[0], (tick,))
    assert len(ranked._heap) <= 2 * 10 + 64
