"""Every policy that has a name keeps the contract."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from kvpool.policy.eviction import NEVER_NS, POLICIES, EvictionPolicy, make_policy
from kvpool.pool import deadlines
from kvpool.testing.policy_kit import PolicyKit

_REPEATS_NOT: frozenset[str] = frozenset()

_WARM = {"value": 40_000}  # 16,384 samples, 8,192 tails


def _kit_of(name: str) -> type[PolicyKit]:
    def make(self: PolicyKit) -> EvictionPolicy:
        return make_policy(name)

    return type(f"Test{name}", (PolicyKit,), {"make": make, "repeats": name not in _REPEATS_NOT, "warm": _WARM.get(name, 5_000)})


for _name in POLICIES:
    globals()[f"Test_{_name.replace('-', '_')}"] = _kit_of(_name)


@pytest.mark.parametrize(("name", "make"), POLICIES.items())
def test_make_policy_by_name_makes_a_fresh_one_each_time(name: str, make: Callable[[], EvictionPolicy]) -> None:
    """Two pools in one process must not share an order."""
    first, second = make_policy(name), make_policy(name)
    assert first is not second
    assert type(first) is type(make())


def test_make_policy_unknown_name_lists_the_known_ones() -> None:
    """A typo in a configuration should cost one look at the message."""
    with pytest.raises(ConfigError, match=f"'lru2'.*{', '.join(POLICIES)}"):
        make_policy("lru2")


def test_policies_are_all_documented() -> None:
    """Choosing by name needs to know what the name does."""
    text = (Path(__file__).parents[3] / "docs" / "eviction.md").read_text()
    assert [name for name in POLICIES if f"\n| `{name}` | " not in text] == []


def test_never_is_the_same_for_policies_and_pools() -> None:
    """A block without ttl would else look like one that expires."""
    assert NEVER_NS == deadlines.NEVER_NS == 1 << 63


SCRIPT = """
from hashlib import sha256
from kvpool.policy.eviction import POLICIES, make_policy
from kvpool.testing.policy_kit import history
for name in POLICIES:
    print(name, sha256(repr([*history(make_policy(name), 11)]).encode()).hexdigest())
"""


def test_policies_do_not_depend_on_the_hash_seed() -> None:
    """Two runs of one seed must agree in every process."""
    outputs = [
        subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(outputs[0].splitlines()) == len(POLICIES)
