"""LMCache's L2, through the plugin or as Redis: what the probe's facts and the configuration come to. Pure."""

from collections.abc import Mapping
from typing import Any

from kvpool.client.choose import AUTO
from kvpool.connectors.check.lines import Facts, Line, error, fail, ok, value, warn
from kvpool.connectors.lmcache.settings import Settings
from kvpool.errors import ConfigError

OPTION = "--l2-adapter"
CLASS, MODULE = "KvpoolL2", "kvpool.connectors.lmcache"
TESTED = ("0.5.6",)


def adapter_for(pool: str) -> dict[str, Any]:
    """The adapter that uses the pool through the plugin."""
    return {"type": "plugin", "module_path": MODULE, "class_name": CLASS, "adapter_params": {"pool": pool}}


def pool_of(adapter: Mapping[str, Any]) -> tuple[str, str]:
    """Where the pool is by the adapter's configuration, and by which transport; a door for Redis begins with `resp://`."""
    if adapter.get("type") == "resp":
        return f"resp://{adapter.get('host', '')}:{adapter.get('port', '')}", AUTO
    params = adapter.get("adapter_params")
    params = params if isinstance(params, Mapping) else {}
    return str(params.get("pool", "")), str(params.get("transport", AUTO))


def asked(adapter: Mapping[str, Any]) -> dict[str, Any]:
    """What the probe is asked."""
    plugin = adapter.get("type") != "resp"
    return {
        "steps": ["python", "engine", *(["kvpool", "connector"] if plugin else [])],
        "distributions": ["lmcache"],
        "module": adapter.get("module_path", MODULE),
        "class": adapter.get("class_name", CLASS),
        "contract": ["lmcache.v1.distributed.l2_adapters.base", "L2AdapterInterface"],
    }


def lines(facts: Facts, adapter: Mapping[str, Any]) -> list[Line]:
    """Version, adapter, configuration."""
    return [version_line("lmcache", TESTED, facts), *_adapter_lines(facts, adapter)]


def version_line(name: str, tested: tuple[str, ...], facts: Facts) -> Line:
    """Whether the connector was tested with this version."""
    found, which = value(facts, "engine"), " or ".join(tested)
    if found is None:
        return fail(name, error(facts, "engine"), f"install {name} {which} into this interpreter's environment")
    if found not in tested:
        return warn(name, f"{found} is not one that the connector was tested with", f"use {name} {which}, or try it with care")
    return ok(name, f"{found}, which the connector was tested with")


def contract_line(facts: Facts) -> Line:
    """Whether the class is what the installed engine will take."""
    if trouble := error(facts, "connector"):
        return fail("connector", trouble, "see which class the configuration names, and what it needs")
    found = value(facts, "connector")
    lacks = [f"lacks {name}" for name in found["missing"]] + [f"{name} takes other arguments" for name in found["unlike"]]
    if not found["is_one"] or lacks:
        return fail("connector", "; ".join(lacks) or "is not what this engine takes", "use a kvpool that was tested with this engine")
    return ok("connector", "loads, and has all that this engine calls")


def _adapter_lines(facts: Facts, adapter: Mapping[str, Any]) -> list[Line]:
    kind = adapter.get("type")
    if kind == "resp":
        return [ok("config", "the pool as a server of Redis, start its nodes with --resp-port")]
    if kind != "plugin":
        return [
            fail("config", f"type is {kind!r}", f'write "type":"plugin","module_path":"{MODULE}","class_name":"{CLASS}", or "type":"resp"')
        ]
    found = [contract_line(facts)]
    if (adapter.get("module_path"), adapter.get("class_name")) != (MODULE, CLASS):
        found.append(
            fail("config", f"class_name is {adapter.get('class_name')!r}", f'write "module_path":"{MODULE}","class_name":"{CLASS}"')
        )
    params = adapter.get("adapter_params")
    try:
        settings = Settings.of(params if isinstance(params, Mapping) else {})
    except ConfigError as problem:
        return [*found, fail("config", str(problem), "mend adapter_params")]
    if not settings.scope:
        todo = "give \"scope\", one word for each set of weights and kind of engine: LMCache's keys have the model's name only"
        return [*found, warn("config", "without a scope, models of one name share values, whatever their weights are", todo)]
    return [*found, ok("config", f"scope {settings.scope!r}")]
