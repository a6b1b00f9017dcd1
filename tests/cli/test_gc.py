"""`kvpool gc`: what ran out is counted, and goes when it is meant."""

from kvpool.testing.twin_cluster import A, B, TwinCluster


def test_gc_reports_and_a_dry_run_keeps(twins: TwinCluster) -> None:
    """What ran out is counted, and goes only when it is meant."""
    twins.b.put([b"\x02" * 32], ttl_ms=0)
    dry = twins.json("gc", "--dry-run")
    names = {"node", "expired_leases", "expired_blocks", "orphan_blocks", "orphan_bytes", "dead_bytes", "reclaimed_bytes"}
    assert set(dry) == {"dry_run", "nodes", "errors"}
    assert [set(node) for node in dry["nodes"]] == [names, names]
    assert [(node["node"], node["expired_blocks"], node["reclaimed_bytes"]) for node in dry["nodes"]] == [(A, 0, 0), (B, 1, 4096)]
    assert "nothing was changed" in twins.run("gc", "--dry-run").output
    assert twins.json("gc", "--node", B)["nodes"][0]["expired_blocks"] == 1
    assert twins.json("gc")["nodes"][1]["expired_blocks"] == 0
    assert "Collected" in twins.run("gc").output
