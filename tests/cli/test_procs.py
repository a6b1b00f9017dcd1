"""The table of processes of a local cluster and its flags."""

from pathlib import Path

import pytest

from kvpool.cli.procs import ClusterOptions, local_processes, roles_to_await
from kvpool.errors import ConfigError

URL = "redis://127.0.0.1:1/0?cluster=local"


def _flags(argv: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(argv[3::2], argv[4::2], strict=True))


def test_processes_one_of_each_by_default_with_the_documented_flags() -> None:
    """The flags are those the programs take; every process is told the cluster."""
    specs = local_processes(ClusterOptions(capacity_bytes=4096, port=1234, chunk_tokens=128, dtype="bfloat16", transport="ucx"), URL)
    assert [spec.name for spec in specs] == ["node-0", "prefill-0", "decode-0", "router-0"]
    assert [spec.argv[2] for spec in specs] == ["kvpool.node", "prefill_worker", "decode_worker", "router"]
    node, prefill, decode, router = (_flags(spec.argv) for spec in specs)
    assert {flags["--cluster"] for flags in (node, prefill, decode, router)} == {URL}
    assert (node["--capacity"], len(node["--id"])) == ("4096", 32)
    assert prefill == decode
    assert (prefill["--block-tokens"], prefill["--chunk-tokens"], prefill["--dtype"], prefill["--transport"]) == (
        "16",
        "128",
        "bfloat16",
        "ucx",
    )
    assert (router["--host"], router["--port"], router["--model"]) == ("127.0.0.1", "1234", "smollm2")


def test_processes_stop_from_the_door_inwards() -> None:
    """The router stops taking requests before workers go, and workers before the nodes that hold their blocks."""
    specs = local_processes(ClusterOptions(nodes=2, prefill=2, decode=2), URL)
    assert [spec.role for spec in sorted(specs, key=lambda spec: spec.stop_rank)] == [
        "router",
        *["prefill"] * 2,
        *["decode"] * 2,
        *["node"] * 2,
    ]


def test_processes_of_several_nodes_have_ids_of_their_own() -> None:
    """A node keeps its identity over restarts, so it is given one; two nodes never share it."""
    ids = {_flags(spec.argv)["--id"] for spec in local_processes(ClusterOptions(nodes=3), URL) if spec.role == "node"}
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("model", "name"),
    [("smollm2", "smollm2"), ("/models/My Model/", "My-Model"), ("/x/tiny.gguf", "tiny"), ("./a", "a"), ("/", "model")],
)
def test_served_model_name_follows_the_model(model: str, name: str) -> None:
    """Clients need a name without slashes and spaces."""
    assert ClusterOptions(model=model).served_model_name == name


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": -1},
        {"nodes": 65},
        {"copies": 0},
        {"copies": 17},
        {"decode": 0},
        {"port": 65536},
        {"transport": "rdma"},
        {"dtype": "int8"},
        {"capacity_bytes": 0},
        {"block_tokens": 0},
        {"chunk_tokens": 0},
        {"request_timeout_s": 0},
    ],
)
def test_options_out_of_range_refused(wrong: dict[str, int | str]) -> None:
    """Nothing is started that can't run."""
    with pytest.raises(ConfigError):
        ClusterOptions(**wrong)  # type: ignore[arg-type]


def test_roles_to_await_skip_what_is_not_started() -> None:
    """A cluster without prefill workers is complete without them."""
    specs = local_processes(ClusterOptions(nodes=0, prefill=0, decode=2), URL)
    assert roles_to_await(specs, ("node", "prefill", "decode", "router")) == {"decode": 2, "router": 1}


def test_node_with_an_ssd_tier_keeps_its_directory_and_id_over_runs(tmp_path: Path) -> None:
    """Which blocks a node owns follows from its id: with another one it would not look for what its disk holds."""
    options = ClusterOptions(nodes=2, ssd=tmp_path, ssd_capacity_bytes=1 << 30, policy="lru")
    first, second = ([spec.argv for spec in local_processes(options, "redis://x") if spec.role == "node"] for _ in range(2))
    assert first == second
    for index, argv in enumerate(first):
        flags = dict(zip(argv[3::2], argv[4::2], strict=False))
        assert (flags["--ssd"], flags["--ssd-capacity"], flags["--policy"]) == (str(tmp_path / f"node-{index}"), str(1 << 30), "lru")
    assert first[0] != first[1]
