"""From what an operator gives to a plan for each engine: which pool to look at, what to ask the probe, how to judge what both say."""

import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpool.client.choose import AUTO
from kvpool.connectors.check import lmcache, sglang, vllm
from kvpool.connectors.check.lines import Facts, Line, error, fail, ok, value, warn
from kvpool.connectors.check.pool import NodeSeen, pool_lines
from kvpool.connectors.check.spelling import parse_object, split_flags
from kvpool.errors import ConfigError

Nodes = Sequence[NodeSeen] | None
Decide = Callable[[Facts, Nodes, Mapping[str, str]], list[Line]]
_NEEDS = (3, 11)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one engine is checked. `pool`: empty where none is said; `start_with`: flags that make the engine use it."""

    pool: str
    transport: str
    asked: Mapping[str, Any]
    start_with: Sequence[str]
    decide: Decide

    def lines(self, facts: Facts, nodes: Nodes, trouble: str, environment: Mapping[str, str]) -> list[Line]:
        """All answers, the most basic first; what can't be known because the interpreter failed is left out."""
        seen = pool_lines(self.pool, self.transport, nodes, trouble) if self.pool else []
        if trouble := error(facts, "python"):
            return [fail("python", trouble, "name the interpreter that the engine runs in with --python"), *seen]
        inside = [_kvpool_line(facts)] if "kvpool" in facts else []
        return [_python_line(facts), *inside, *self.decide(facts, nodes, environment), *seen]


def plan_vllm(config: str | None, pool: str | None, flags: Sequence[str]) -> Plan:
    """vLLM with the KV connector. Raises `ConfigError` for what isn't JSON."""
    rest, spelled = split_flags(flags, "--kv-transfer-config")
    given = config or spelled
    transfer = dict(parse_object(given, "the transfer configuration")) if given else vllm.transfer_for(pool or "")
    extra = transfer.get("kv_connector_extra_config")
    if pool and isinstance(extra, Mapping) and "pool" not in extra:
        transfer["kv_connector_extra_config"] = {**extra, "pool": pool}
    settings, trouble = None, ""
    try:
        settings = vllm.settings_of(transfer)
    except ConfigError as problem:
        trouble = str(problem)

    def decide(facts: Facts, nodes: Nodes, environment: Mapping[str, str]) -> list[Line]:
        config_lines = vllm.transfer_lines(transfer, settings, trouble, facts)
        found = [vllm.version_line(facts, settings), *vllm.connector_lines(facts), *config_lines]
        return [*found, *vllm.engine_lines(facts, settings, nodes, environment)]

    return Plan(
        pool=settings.pool if settings else pool or "",
        transport=settings.transport if settings else AUTO,
        asked=vllm.asked(rest, transfer),
        start_with=["--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))],
        decide=decide,
    )


def plan_sglang(config: str | None, pool: str | None, flags: Sequence[str]) -> Plan:
    """SGLang's HiCache with the dynamic storage backend."""
    _, spelled = split_flags(flags, sglang.OPTION)
    given = config or spelled
    extra = dict(parse_object(given, "the backend's extra configuration")) if given else sglang.extra_for(pool or "")
    if pool:
        extra.setdefault("pool", pool)
    return Plan(
        pool=str(extra.get("pool", "")),
        transport=str(extra.get("transport", AUTO)),
        asked=sglang.asked(extra),
        start_with=["--hicache-storage-backend", "dynamic", sglang.OPTION, json.dumps(extra, separators=(",", ":"))],
        decide=lambda facts, nodes, environment: sglang.lines(facts, extra),
    )


def plan_lmcache(config: str | None, pool: str | None, flags: Sequence[str]) -> Plan:
    """LMCache's server with the pool as its L2, through the plugin or as Redis."""
    _, spelled = split_flags(flags, lmcache.OPTION)
    given = config or spelled
    adapter = dict(parse_object(given, "the L2 adapter")) if given else lmcache.adapter_for(pool or "")
    if pool and isinstance(adapter.get("adapter_params"), Mapping):
        adapter["adapter_params"] = {"pool": pool, **adapter["adapter_params"]}
    where, transport = lmcache.pool_of(adapter)
    return Plan(
        pool=where,
        transport=transport,
        asked=lmcache.asked(adapter),
        start_with=[lmcache.OPTION, json.dumps(adapter, separators=(",", ":"))],
        decide=lambda facts, nodes, environment: lmcache.lines(facts, adapter),
    )


ENGINES: Mapping[str, Callable[[str | None, str | None, Sequence[str]], Plan]] = {
    "vllm": plan_vllm,
    "sglang": plan_sglang,
    "lmcache": plan_lmcache,
}


def _python_line(facts: Facts) -> Line:
    version = value(facts, "python")["version"]
    if tuple(map(int, version.split(".")[:2])) < _NEEDS:
        return fail("python", version, f"kvpool needs Python {_NEEDS[0]}.{_NEEDS[1]} or later")
    return ok("python", version)


def _kvpool_line(facts: Facts) -> Line:
    """Whether the engine's interpreter has the kvpool that this command is of."""
    if trouble := error(facts, "kvpool"):
        return fail("kvpool", trouble, "install kvpool into the engine's environment, or put it on PYTHONPATH with what its client needs")
    found, own = value(facts, "kvpool"), importlib.metadata.version("kvpool")
    if found["version"] not in ("", own):
        return warn("kvpool", f"{found['version']} from {found['path']}, this command is {own}", "use one version of kvpool everywhere")
    return ok("kvpool", f"{found['version'] or own} from {found['path']}")
