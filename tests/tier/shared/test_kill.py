"""Owners of a shared tier that are killed: whoever reads what they left reads right bytes or nothing."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import FrameError, UnavailableError
from kvpool.testing.shared_owner import KEYS, SharedOwner, length_of, open_owned, read_all
from kvpool.testing.tier_kit import key_of, record_of, soon
from kvpool.tier import DEFAULT_DIRECTORY
from kvpool.tier.shared import SharedTierReader
from kvpool.units import SECOND


@pytest.fixture
def path() -> Iterator[Path]:
    """A path on shared memory."""
    with tempfile.TemporaryDirectory(dir=DEFAULT_DIRECTORY) as directory:
        yield Path(directory) / "tier.shared"


def test_owner_killed_at_each_step_of_puts_and_removes_leaves_no_wrong_byte(path: Path) -> None:
    """Each write and flush of the protocol is a place to die, also half-way; what was ready before can still be read."""
    command = [sys.executable, "-m", "kvpool.testing.shared_owner", str(path), "--at-every-step"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=240)
    told = json.loads(ran.stdout)
    assert told["deaths"] > 80
    assert told["readable"] > told["deaths"]
    assert 4 <= told["unattached"] < 20


def test_readers_of_an_owner_killed_at_random_read_right_bytes_before_and_after(path: Path) -> None:
    """Real processes: a reader that was attached reads through the death and through the next owner's start."""
    before: SharedTierReader | None = None
    hits = 0
    for incarnation in (1, 2, 3):
        owner = SharedOwner(path, incarnation)
        try:
            with SharedTierReader.open(path) as reader:
                assert reader.shape.incarnation == incarnation
                if before is not None:
                    assert not before.live
                    assert read_all(before) == 0
                    before.close()
                end = time.monotonic_ns() + 60 * SECOND
                while (reader.counters["hits"] < 40 or reader.counters["misses"] == 0) and time.monotonic_ns() < end:
                    hits += read_all(reader)
                owner.kill()
                assert reader.live
                assert read_all(reader) > 0
        finally:
            owner.kill()
        before = SharedTierReader.open(path)
    assert hits >= 120
    if before is not None:
        before.close()


def test_reader_of_an_owner_that_ends_gets_misses(path: Path) -> None:
    """A retired tier is empty for readers, though its bytes are still mapped; the file is gone."""
    tier = open_owned(path, 1)
    tier.put([record_of(n, length_of(n)) for n in range(3)], soon())
    with SharedTierReader.open(path) as reader:
        assert read_all(reader) == 3
        tier.close()
        assert not path.exists()
        assert not reader.live
        assert read_all(reader) == 0
        assert reader.find([key_of(n) for n in range(KEYS)]) == [None] * KEYS
    with pytest.raises(UnavailableError):
        SharedTierReader.open(path)


def test_reader_of_something_else_refused(path: Path) -> None:
    """A path to a wrong file is told at once."""
    path.write_bytes(b"")
    with pytest.raises(UnavailableError, match="no bytes"):
        SharedTierReader.open(path)
    path.write_bytes(np.random.default_rng(1).bytes(8192))
    with pytest.raises(FrameError, match="magic"):
        SharedTierReader.open(path)
    with pytest.raises(UnavailableError, match="neither"):
        SharedTierReader.open(path.parent)
    with pytest.raises(UnavailableError, match="memory device"):
        SharedTierReader.open("/dev/null")
