"""`kvpool tiers`: books and state of every tier."""

from kvpool.cli.tiers import SHOWN_COUNTERS, interesting
from kvpool.testing.twin_cluster import A, B, TwinCluster


def test_tiers_shows_books_and_exits_3_when_one_is_not_ok(twins: TwinCluster) -> None:
    """A disk that went read-only is seen, and noticed by scripts."""
    answer = twins.json("tiers")
    assert [node["node"] for node in answer["nodes"]] == [A, B]
    assert answer["nodes"][0]["tiers"] == [
        {
            "name": "arena",
            "state": "ok",
            "reason": "",
            "capacity_bytes": 64 << 20,
            "used_bytes": 8192,
            "objects": 2,
            "max_objects": 0,
            "counters": {"corrupt": 0},
        }
    ]
    twins.b.tier_state, twins.b.tier_reason = "read-only", "EROFS [Errno 30]"
    result = twins.run("tiers")
    assert result.exit_code == 3
    for piece in ("arena", "read-only", "EROFS [Errno 30]", "8.00 KiB", "64.00 MiB", "0.0 %"):
        assert piece in result.output


def test_interesting_counters_put_harm_first_and_leave_zeros_out() -> None:
    """One corrupt record matters more than a million hits; a row has room for a few."""
    counters = {"hits": 1_000_000, "corrupt": 1, "torn": 0, "write_errors": 2, **{f"other_{index}": index for index in range(9)}}
    shown = interesting(counters)
    assert shown[:4] == [("write_errors", 2), ("corrupt", 1), ("hits", 1_000_000), ("other_8", 8)]
    assert len(shown) == SHOWN_COUNTERS
