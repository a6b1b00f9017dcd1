"""What Ray is asked for, and the command line a process gets where it was placed."""

import pytest

from kvpool.cli.procs import ClusterOptions, local_processes
from kvpool.cli.ray.placement import Group, located, needed, plan_groups
from kvpool.errors import ConfigError
from kvpool.units import GIB

URL = "redis://10.0.0.1:6379/0?cluster=c"


def test_plan_spreads_nodes_strictly_and_workers_softly() -> None:
    """One pool node per host, workers shared out, the router where it was started; memory only where it is held."""
    specs = local_processes(ClusterOptions(nodes=3, prefill=2, decode=4), URL)
    assert plan_groups(specs, one_host=False, node_bytes=GIB) == (
        Group(role="node", strategy="STRICT_SPREAD", bundles=3, memory_bytes=GIB),
        Group(role="prefill", strategy="SPREAD", bundles=2),
        Group(role="decode", strategy="SPREAD", bundles=4),
        Group(role="router", strategy="HERE", bundles=1),
    )


def test_plan_of_one_host_packs_everything() -> None:
    """There is nothing to spread over; a second node would only split the same memory."""
    options = ClusterOptions(nodes=1, prefill=0, decode=2)
    groups = plan_groups(local_processes(options, URL), one_host=True, node_bytes=GIB)
    assert [(group.role, group.strategy) for group in groups] == [("node", "PACK"), ("decode", "PACK"), ("router", "HERE")]
    with pytest.raises(ConfigError, match="--nodes 2"):
        plan_groups(local_processes(ClusterOptions(nodes=2), URL), one_host=True, node_bytes=GIB)


def test_plan_reserves_only_the_floor_of_a_scaled_group() -> None:
    """What comes and goes with the load holds no reservation while it is away."""
    specs = local_processes(ClusterOptions(prefill=3, decode=2), URL)
    groups = plan_groups(specs, one_host=False, node_bytes=GIB, floor={"prefill": 1, "decode": 4})
    assert {group.role: group.bundles for group in groups} == {"node": 1, "prefill": 1, "decode": 2, "router": 1}


def test_bundle_asks_for_a_core_and_for_memory_that_is_held() -> None:
    """These are the words Ray counts in."""
    assert Group(role="decode", strategy="SPREAD", bundles=1).bundle == {"CPU": 1.0}
    assert Group(role="node", strategy="PACK", bundles=1, memory_bytes=GIB).bundle == {"CPU": 1.0, "memory": float(GIB)}


def test_own_ray_has_room_for_the_grown_cluster() -> None:
    """With the most workers of each group everything still fits."""
    groups = plan_groups(local_processes(ClusterOptions(), URL), one_host=True, node_bytes=GIB)
    assert needed(groups, {}) == (4, GIB)
    assert needed(groups, {"prefill": 3, "decode": 5}) == (10, GIB)


def test_process_listens_at_the_host_it_was_placed_on() -> None:
    """Interpreter and address are the host's own; everything else stands as it was."""
    for spec in local_processes(ClusterOptions(port=8123), URL):
        words = located(spec, python="/opt/python", host="10.0.0.7").argv
        assert words[0] == "/opt/python"
        assert "127.0.0.1" not in " ".join(words)
        flag = "--host" if spec.role == "router" else "--listen"
        assert words[words.index(flag) + 1] == ("10.0.0.7" if spec.role == "router" else "10.0.0.7:0")
        assert len(words) == len(spec.argv)
        assert located(spec, python=spec.argv[0], host="127.0.0.1") == spec
