"""Who stays awake for the next packet: only while packets come closely, nobody needs the core, and it pays."""

import pytest

from kvpool import cores
from kvpool.wire.vigil import Vigil

WATCH_NS, CLOSE_NS, LONG_NS = 250, 100_000, 5_000_000


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a core."""
    monkeypatch.setattr(cores, "wanted", lambda: False)


def test_only_packets_that_follow_closely_are_watched_for() -> None:
    """A peer that is idle costs nothing."""
    vigil = Vigil(WATCH_NS)
    assert (vigil.until(LONG_NS), vigil.brisk) == (0, False)
    now_ns = LONG_NS + CLOSE_NS
    assert (vigil.until(now_ns), vigil.brisk) == (now_ns + WATCH_NS, True)
    vigil.ended(came=True)
    assert (vigil.until(now_ns + LONG_NS), vigil.brisk) == (0, False)


def test_watches_in_vain_become_rare_and_one_that_pays_ends_that() -> None:
    """A peer that always answers late costs a watch in 65 packets."""
    vigil, now_ns, waits = Vigil(WATCH_NS), LONG_NS, list[int]()
    vigil.until(now_ns)
    for _ in range(8):
        skipped = 0
        while not vigil.until(now_ns := now_ns + CLOSE_NS):
            skipped += 1
        waits.append(skipped)
        vigil.ended(came=False)
    assert waits == [0, 2, 4, 8, 16, 32, 64, 64]
    while not vigil.until(now_ns := now_ns + CLOSE_NS):
        pass
    vigil.ended(came=True)
    assert vigil.until(now_ns + CLOSE_NS)


def test_a_core_that_somebody_waits_for_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether one does is asked about once a millisecond."""
    asked: list[bool] = []

    def wanted() -> bool:
        asked.append(True)
        return True

    monkeypatch.setattr(cores, "wanted", wanted)
    vigil = Vigil(WATCH_NS)
    assert not any(vigil.until(now_ns) for now_ns in range(LONG_NS, LONG_NS + 10 * CLOSE_NS, CLOSE_NS))
    assert (vigil.brisk, len(asked)) == (False, 1)
    monkeypatch.setattr(cores, "wanted", lambda: False)
    assert vigil.until(LONG_NS + 20 * CLOSE_NS) == 0  # a millisecond without packets
    assert vigil.until(LONG_NS + 21 * CLOSE_NS)
