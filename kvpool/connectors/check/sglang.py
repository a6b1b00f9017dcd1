"""SGLang's HiCache storage backend: what the probe's facts and the configuration come to. Pure."""

from collections.abc import Mapping
from typing import Any

from kvpool.connectors.check.lines import Facts, Line, fail, ok, warn
from kvpool.connectors.check.lmcache import contract_line, version_line
from kvpool.connectors.sglang.settings import Settings
from kvpool.errors import ConfigError

OPTION = "--hicache-storage-backend-extra-config"
CLASS, MODULE = "KvpoolHiCache", "kvpool.connectors.sglang"
TESTED = ("0.5.23",)


def extra_for(pool: str) -> dict[str, Any]:
    """The extra configuration that uses the pool."""
    return {"backend_name": "kvpool", "module_path": MODULE, "class_name": CLASS, "interface_v1": 1, "pool": pool}


def asked(extra: Mapping[str, Any]) -> dict[str, Any]:
    """What the probe is asked."""
    return {
        "steps": ["python", "engine", "kvpool", "connector"],
        "distributions": ["sglang"],
        "module": extra.get("module_path", MODULE),
        "class": extra.get("class_name", CLASS),
        "contract": ["sglang.srt.mem_cache.hicache_storage", "HiCacheStorage"],
    }


def lines(facts: Facts, extra: Mapping[str, Any]) -> list[Line]:
    """Version, backend, configuration."""
    return [version_line("sglang", TESTED, facts), contract_line(facts), *_config_lines(extra)]


def _config_lines(extra: Mapping[str, Any]) -> list[Line]:
    wanted = {"module_path": MODULE, "class_name": CLASS}
    wrong = [name for name, text in wanted.items() if extra.get(name) != text] + ([] if extra.get("backend_name") else ["backend_name"])
    if wrong:
        todo = f'write "backend_name":"kvpool","module_path":"{MODULE}","class_name":"{CLASS}"'
        return [fail("config", ", ".join(f"{name} is {extra.get(name)!r}" for name in wrong), todo)]
    try:
        settings = Settings.parse(extra)
    except ConfigError as problem:
        return [fail("config", str(problem), f"mend {OPTION}")]
    if not settings.interface_v1:
        return [warn("config", "without interface_v1 SGLang copies every page once more on its way", 'write "interface_v1":1')]
    if not settings.scope:
        todo = "give \"scope\", one word for each set of weights: SGLang's keys have the model's name only"
        return [warn("config", "without a scope, models of one name share pages, whatever their weights are", todo)]
    return [ok("config", f"scope {settings.scope!r}")]
