"""Sealed tiers: the contract of a tier, and tampering is a miss, never wrong bytes."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.block import BlockKey
from kvpool.errors import ConfigError
from kvpool.policy.eviction import PrefixLru
from kvpool.pool.allocator import Allocator
from kvpool.testing.tier_kit import TierKit, assert_balanced, data_of, key_of, read, record_of, soon
from kvpool.tier.contract import Record, Tier
from kvpool.tier.memory import MemoryTier
from kvpool.tier.pages import Bytes
from kvpool.tier.region import BytesRegion
from kvpool.tier.sealed import OVERHEAD, SealedTier, SealKeys
from kvpool.tier.ssd import SsdTier
from kvpool.units import KIB, MIB
from tests.tier.test_kit import MemoryWorld

OLD, NEW = b"o" * 32, b"n" * 32


def memory(nbytes: int = MIB) -> MemoryTier:
    return MemoryTier(BytesRegion(nbytes), Allocator(nbytes), PrefixLru())


def raw(tier: Tier, key: BlockKey) -> Bytes:
    """The bytes that are really stored."""
    entry = tier.find([key])[0]
    assert entry is not None
    buffer = np.empty(entry.length, np.uint8)
    assert tier.get([(key, buffer)], soon()) == [True]
    return buffer


def forge(tier: Tier, key: BlockKey, data: Bytes) -> None:
    """Put other bytes under a name, with sums of the tier below that are right."""
    tier.remove([key])
    assert tier.put([Record(key, None, 0, data)], soon()) == [True]


class SealedWorld(MemoryWorld):
    """Sealed tiers over memory; damage is done below."""

    def open(self, capacity_bytes: int, max_objects: int = 1024) -> Tier:
        """A tier with room for what sealing adds."""
        inner = super().open(capacity_bytes, max_objects)
        tier = SealedTier(inner, SealKeys([NEW]))
        self.tiers.append(tier)
        return tier

    def corrupt(self, tier: Tier, key: BlockKey) -> None:
        """In the tier below."""
        assert isinstance(tier, SealedTier)
        super().corrupt(tier._inner, key)


class TestSealed(TierKit):
    """The contract holds through the seal."""

    @pytest.fixture
    def world(self) -> Iterator[SealedWorld]:
        made = SealedWorld()
        yield made
        made.close()


def test_stored_bytes_tell_nothing_of_the_record() -> None:
    """Nor do two seals of equal bytes look alike."""
    keys = SealKeys([NEW])
    data = np.zeros(64 * KIB, np.uint8)
    one, two = keys.seal(key_of(1), data), keys.seal(key_of(1), data)
    assert one.size == data.size + OVERHEAD
    assert not np.array_equal(one, two)
    assert np.count_nonzero(one == 0) < 0.02 * one.size


@pytest.mark.parametrize("at", [0, 5, 15, 24, 500, -1])
def test_changed_byte_is_a_miss_wherever_it_is(at: int) -> None:
    """Magic, key id, nonce, text, tag; with the sum of the tier below made right again."""
    inner = memory()
    tier = SealedTier(inner, SealKeys([NEW]))
    assert tier.put([record_of(1)], soon()) == [True]
    changed = raw(inner, key_of(1))
    changed[at] ^= 1
    forge(inner, key_of(1), changed)
    assert read(tier, [1]) == [False]
    assert tier.find([key_of(1)]) == [None]
    assert (tier.books().counters["corrupt"], tier.books().counters["unopened"]) == (1, 1)
    assert_balanced(tier)


def test_record_under_another_name_is_a_miss() -> None:
    """A copy of one tenant's record must not pass for another block."""
    inner = memory()
    tier = SealedTier(inner, SealKeys([NEW]))
    tier.put([record_of(1), record_of(2)], soon())
    forge(inner, key_of(2), raw(inner, key_of(1)))
    assert read(tier, [2]) == [False]
    assert read(tier, [1]) == [True]


@pytest.mark.parametrize("length", [1, OVERHEAD - 1, OVERHEAD, OVERHEAD + 1, 1000])
def test_record_that_was_never_sealed_is_a_miss(length: int) -> None:
    """A disk that was used without a key, or whatever else lies there."""
    inner = memory()
    tier = SealedTier(inner, SealKeys([NEW]))
    inner.put([Record(key_of(1), None, 0, data_of(1, length))], soon())
    entry = tier.find([key_of(1)])[0]
    assert entry is not None
    assert tier.get([(key_of(1), np.empty(entry.length, np.uint8))], soon()) == [False]


def test_verify_finds_what_does_not_open() -> None:
    """A scrub reads through the seal."""
    inner = memory()
    tier = SealedTier(inner, SealKeys([NEW]))
    tier.put([record_of(1), record_of(2)], soon())
    changed = raw(inner, key_of(2))
    changed[100] ^= 1
    forge(inner, key_of(2), changed)
    assert (tier.verify(key_of(1)), tier.verify(key_of(2)), tier.verify(key_of(2))) == (True, False, None)


def test_keys_are_rotated_by_putting_a_new_one_first(tmp_path: Path) -> None:
    """Old records open until the old key is taken out."""
    path, inner = tmp_path / "keys", memory()
    path.write_text(OLD.hex() + "\n")
    SealedTier(inner, SealKeys.load(path)).put([record_of(1)], soon())
    path.write_text(NEW.hex() + "\n" + OLD.hex() + "\n")
    both = SealedTier(inner, SealKeys.load(path))
    both.put([record_of(2)], soon())
    assert read(both, [1, 2]) == [True, True]
    assert read(SealedTier(inner, SealKeys([NEW])), [1, 2]) == [False, True]


@pytest.mark.parametrize("content", ["", "zz", "ab" * 31, "ab" * 33, "é"])
def test_file_without_keys_is_refused(tmp_path: Path, content: str) -> None:
    """Without quoting it."""
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        SealKeys.load(path)
    assert not content or content not in str(caught.value)


def test_sealed_log_survives_a_restart_and_shows_no_frame(tmp_path: Path) -> None:
    """Over the real log: nothing of the record in its files, all of it with the key after a restart."""
    text = np.frombuffer(b"the secret of a tenant " * 100, np.uint8)
    record = Record(key_of(1), None, 0, text.copy())

    def opened(incarnation: int) -> SealedTier:
        inner = SsdTier.open(tmp_path, capacity_bytes=128 * MIB, max_objects=100, incarnation=incarnation)
        return SealedTier(inner, SealKeys([NEW]))

    tier = opened(1)
    assert tier.put([record], soon()) == [True]
    tier.close()
    assert not any(b"secret of a tenant" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    again = opened(2)
    buffer = np.empty(text.size, np.uint8)
    assert again.get([(key_of(1), buffer)], soon()) == [True]
    assert np.array_equal(buffer, text)
    again.close()
