"""The frequency sketch: never too low, rarely too high, forgets, stays small."""

import subprocess
import sys
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import ConfigError
from kvpool.policy.sketch import MAX_COUNT, FrequencySketch


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_sketch_fresh_knows_nothing() -> None:
    """A key nobody saw must not be promoted."""
    assert FrequencySketch(100).estimate(name(1)) == 0


def test_sketch_counts_each_sighting_up_to_fifteen() -> None:
    """Four bits: the count stops instead of running into its neighbour's bits."""
    sketch = FrequencySketch(16)
    seen = []
    for _ in range(20):
        sketch.add(name(7))
        seen.append(sketch.estimate(name(7)))
    assert seen == [*range(1, 16), 15, 15, 15, 15, 15]
    assert [sketch.estimate(name(other)) for other in range(100, 104)] == [0, 0, 0, 0]


@given(st.lists(st.integers(0, 40), max_size=150))
@settings(deadline=None, max_examples=100)
def test_sketch_before_a_halving_never_estimates_too_low(keys: list[int]) -> None:
    """Count-min's promise: collisions only add."""
    sketch, model = FrequencySketch(16), Counter(keys)
    for key in keys:
        sketch.add(name(key))
    assert all(sketch.estimate(name(key)) >= min(count, MAX_COUNT) for key, count in model.items())


def test_sketch_with_as_many_keys_as_its_width_is_mostly_exact() -> None:
    """Hot and cold keys must be told apart at the load the sketch is made for."""
    sketch, choice = FrequencySketch(4096), Random(3)
    counts = {key: choice.choice([1, 1, 1, 2, 5]) for key in range(4096)}
    for key, count in counts.items():
        for _ in range(count):
            sketch.add(name(key))
    exact = sum(sketch.estimate(name(key)) == count for key, count in counts.items())
    strangers = sum(sketch.estimate(name(key)) >= 2 for key in range(10_000, 14_096))
    assert exact > 0.85 * 4096
    assert strangers < 0.15 * 4096


def test_sketch_old_popularity_halves_away() -> None:
    """What was hot an hour ago must give way to what is hot now."""
    sketch = FrequencySketch(16)
    for _ in range(15):
        sketch.add(name(1))
    for turn in range(10 * 16):
        sketch.add(name(100 + turn % 2))
    assert sketch.estimate(name(1)) == 7
    assert sketch.estimate(name(100)) <= MAX_COUNT


def test_sketch_memory_stays_two_bytes_per_counter_of_a_row() -> None:
    """Bounded however many keys pass by."""
    sketch = FrequencySketch(1000)
    for key in range(30_000):
        sketch.add(name(key))
    assert (sketch.width, len(sketch._counters)) == (1024, 2048)


@pytest.mark.parametrize("width", [0, -1, 1 << 40])
def test_sketch_of_impossible_width_is_refused(width: int) -> None:
    """A width of 0 would divide by nothing, a huge one would take the machine."""
    with pytest.raises(ConfigError, match="wide"):
        FrequencySketch(width)


SCRIPT = """
from kvpool.policy.sketch import FrequencySketch
sketch = FrequencySketch(64)
for n in range(1000):
    sketch.add((n % 90).to_bytes(32, "big"))
print([sketch.estimate(n.to_bytes(32, "big")) for n in range(90)])
"""


def test_sketch_estimates_do_not_depend_on_the_hash_seed() -> None:
    """Two nodes, or two runs of one seed, must agree."""
    outputs = [
        subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1] != ""
