"""`kvpool evict`: what goes, what waits, what stays."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvpool.block import BlockKey
from kvpool.request import admin as a
from kvpool.testing.twin_cluster import KEYS, STRANGER, TEXT, A, B, TwinCluster
from kvpool.wire.fence import NodeIdentity


def outcomes(answer: Any) -> list[dict[str, str]]:
    return [block["outcomes"] for block in answer["blocks"]]


def test_evict_prefix_removes_all_copies_and_a_dry_run_none(twins: TwinCluster) -> None:
    """What the dry run says is what happens then."""
    expected = [{A: "evicted", B: "absent"}, {A: "evicted", B: "evicted"}, {A: "absent", B: "evicted"}]
    dry = twins.json("evict", "--prefix", TEXT, "--dry-run")
    assert (dry["dry_run"], outcomes(dry)) == (True, expected)
    assert len(twins.a.blocks) == len(twins.b.blocks) == 2
    answer = twins.json("evict", "--prefix", TEXT)
    assert set(answer) == {"dry_run", "model", "blocks", "totals", "absent", "errors"}
    assert (answer["dry_run"], outcomes(answer), answer["errors"]) == (False, expected, {})
    assert (answer["totals"], answer["absent"]) == ({"evicted": 4, "held": 0, "pinned": 0}, 0)
    assert [(block["key"], block["tokens"]) for block in answer["blocks"]][2] == (KEYS[2].hex(), [32, 40])
    assert not twins.a.blocks
    assert not twins.b.blocks
    again = twins.run("evict", "--prefix", TEXT)
    assert again.exit_code == 0
    assert "3 of 3 blocks are absent" in again.output


def test_evict_goes_from_the_tail_to_the_head(twins: TwinCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted at any point, what is left is a prefix that can be used."""
    seen: list[BlockKey] = []
    real = twins.b.evict

    async def evict(keys: Sequence[BlockKey], *, dry_run: bool) -> list[a.EvictOutcome]:
        seen.extend(keys)
        return await real(keys, dry_run=dry_run)

    monkeypatch.setattr(twins.b, "evict", evict)
    twins.json("evict", "--prefix", TEXT)
    assert seen == KEYS[::-1]


def test_evict_of_leased_and_pinned_blocks_says_what_stays(twins: TwinCluster) -> None:
    """Held is as good as gone (exit code 0); a hard pin is a refusal (exit code 3)."""
    twins.a.lease(KEYS[:1], "reader")
    held = twins.json("evict", KEYS[0].hex())
    assert outcomes(held) == [{A: "held", B: "absent"}]
    twins.json("pin", KEYS[2].hex(), "--hard")
    kept = twins.json("evict", KEYS[2].hex(), STRANGER, exit_code=3)
    assert outcomes(kept) == [{A: "absent", B: "pinned"}, {A: "absent", B: "absent"}]
    assert (kept["totals"], kept["absent"]) == ({"evicted": 0, "held": 0, "pinned": 1}, 1)
    result = twins.run("evict", KEYS[2].hex(), "--dry-run")
    assert result.exit_code == 3
    for piece in ("nothing was changed", "1 kept by hard pins", "pinned", "bbbbbbbb"):
        assert piece in result.output


def test_evict_that_stopped_half_way_tells_what_was_done(twins: TwinCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that goes away between two batches has an outcome for the first and an error for the rest, and hides nobody else's."""
    monkeypatch.setattr("kvpool.request.admin.MAX_ADMIN_KEYS", 2)
    real = twins.b.evict

    async def evict(keys: Sequence[BlockKey], *, dry_run: bool) -> list[a.EvictOutcome]:
        done = await real(keys, dry_run=dry_run)
        twins.b.identity = NodeIdentity(B, 99)  # it restarts
        return done

    monkeypatch.setattr(twins.b, "evict", evict)
    answer = twins.json("evict", "--prefix", TEXT, exit_code=2)
    assert outcomes(answer) == [{A: "evicted"}, {A: "evicted", B: "evicted"}, {A: "absent", B: "evicted"}]
    assert list(answer["errors"]) == [B]
