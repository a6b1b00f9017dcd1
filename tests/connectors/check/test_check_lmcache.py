"""What the check says of LMCache and SGLang: planted faults, each with its line."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from kvpool.connectors.check.engines import ENGINES
from kvpool.connectors.check.lines import Line
from kvpool.connectors.check.pool import NodeSeen
from kvpool.request.pool import NodeDescription
from kvpool.units import GIB

POOL = "127.0.0.1:7070"
VERSIONS = {"lmcache": "0.5.6", "sglang": "0.5.23"}
CONNECTOR = {"is_one": True, "missing": [], "unlike": [], "constructor": 2, "bases": []}


def lines(
    engine: str, config: Mapping[str, Any] | None, facts: Mapping[str, Any] | None = None, pool: str | None = POOL
) -> dict[str, Line]:
    """The answers by what they are about, the worst of each, where all is good but what is given."""
    good: dict[str, Any] = {
        "python": {"value": {"version": "3.11.7", "hash_seed": ""}},
        "engine": {"value": VERSIONS[engine]},
        "kvpool": {"value": {"version": "", "path": "/somewhere"}},
        "connector": {"value": CONNECTOR},
    }
    books = NodeDescription(
        node_id="ab" * 16, incarnation=1, capacity_bytes=GIB, free_bytes=GIB, used_bytes=0, pinned_bytes=0, blocks=0, read_leases=0,
        write_leases=0,
    )  # fmt: skip
    plan = ENGINES[engine](json.dumps(config) if config is not None else None, pool, [])
    found = plan.lines({**good, **(facts or {})}, [NodeSeen(address=POOL, description=books, reach="shm")], "", {})
    rank = ("ok", "warn", "fail")
    return {line.what: line for line in sorted(found, key=lambda line: rank.index(line.state))}


def plugin(**params: Any) -> dict[str, Any]:
    return {"type": "plugin", "module_path": "kvpool.connectors.lmcache", "class_name": "KvpoolL2", "adapter_params": params}


def backend(**extra: Any) -> dict[str, Any]:
    return {"backend_name": "kvpool", "module_path": "kvpool.connectors.sglang", "class_name": "KvpoolHiCache", "interface_v1": 1, **extra}


def test_good_setups_have_nothing_to_do() -> None:
    """Nobody should be sent to mend what works; the pool's address may be given beside the configuration."""
    for found in (lines("lmcache", plugin(scope="m", pool=POOL)), lines("lmcache", plugin(scope="m")), lines("sglang", backend(scope="m"))):
        assert {line.state for line in found.values()} == {"ok"}, found
    resp = lines("lmcache", {"type": "resp", "host": "127.0.0.1", "port": 6380}, pool=None)
    assert {line.state for line in resp.values()} == {"ok"}
    assert "connector" in lines("lmcache", plugin(scope="m"))


@pytest.mark.parametrize(
    ("engine", "config", "facts", "what", "state"),
    [
        ("lmcache", plugin(pool=POOL), {}, "config", "warn"),
        ("lmcache", plugin(pool=POOL, scope="m", colour=1), {}, "config", "fail"),
        ("lmcache", {**plugin(pool=POOL, scope="m"), "class_name": "Other"}, {}, "config", "fail"),
        ("lmcache", {"type": "fs"}, {}, "config", "fail"),
        ("lmcache", plugin(scope="m"), {"engine": {"value": "0.6.0"}}, "lmcache", "warn"),
        ("lmcache", plugin(scope="m"), {"engine": {"error": "no package"}}, "lmcache", "fail"),
        ("lmcache", plugin(scope="m"), {"connector": {"error": "ImportError: x"}}, "connector", "fail"),
        ("sglang", None, {"connector": {"value": {**CONNECTOR, "missing": ["batch_get"]}}}, "connector", "fail"),
        ("sglang", None, {"connector": {"value": {**CONNECTOR, "is_one": False}}}, "connector", "fail"),
        ("sglang", None, {"engine": {"value": "0.4.0"}}, "sglang", "warn"),
        ("sglang", None, {}, "config", "warn"),
        ("sglang", backend(scope="m", interface_v1=0), {}, "config", "warn"),
        ("sglang", backend(class_name="Other"), {}, "config", "fail"),
        ("sglang", backend(backend_name=""), {}, "config", "fail"),
        ("sglang", backend(colour=1), {}, "config", "fail"),
    ],
)
def test_fault_has_its_line(engine: str, config: Mapping[str, Any] | None, facts: Mapping[str, Any], what: str, state: str) -> None:
    """Each thing that can be wrong is named, and so is what to do."""
    found = lines(engine, config, facts)[what]
    assert found.state == state
    assert found.todo
