"""Runs in the engine's interpreter, which may lack kvpool: only the standard library is imported here, all else is tried.

Given to it with `-c`. Standard input: what to look at, as JSON. The last line of its output: `MARK` and what each step found, as JSON.
"""

import hashlib
import importlib
import importlib.metadata
import inspect
import io
import json
import os
import sys
from collections.abc import Callable
from typing import Any

MARK = "kvpool-probe "
_SAID = 600


def main() -> None:
    """Do the steps that are asked for, each for itself: one that fails leaves the others to be tried."""
    if sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]  # the engine's own command doesn't look there
    asked = json.load(sys.stdin)
    found: dict[str, Any] = {}
    steps: dict[str, Callable[[dict[str, Any]], Any]] = {
        "python": _python,
        "engine": _engine,
        "kvpool": _kvpool,
        "connector": _connector,
        "flags": _flags,
        "transfer": _transfer,
    }
    for name, step in steps.items():
        if name in asked["steps"]:
            try:
                found[name] = {"value": step(asked)}
            except (Exception, SystemExit) as error:
                found[name] = {"error": _said(error)}
    print("\n" + MARK + json.dumps(found), flush=True)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_SAID]}"


def _python(asked: dict[str, Any]) -> dict[str, str]:
    return {"version": ".".join(map(str, sys.version_info[:3])), "hash_seed": os.environ.get("PYTHONHASHSEED", "")}


def _engine(asked: dict[str, Any]) -> str:
    """Its version, by its distribution: importing it takes long, and may fail for other reasons."""
    for name in asked["distributions"]:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ModuleNotFoundError(f"no package {asked['distributions'][0]} is installed")


def _kvpool(asked: dict[str, Any]) -> dict[str, str]:
    module = importlib.import_module("kvpool.client")
    try:
        version = importlib.metadata.version("kvpool")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return {"version": version, "path": os.path.dirname(os.path.dirname(os.path.abspath(str(module.__file__))))}


def _connector(asked: dict[str, Any]) -> dict[str, Any]:
    """Whether the class is what the installed engine wants: its base, all methods, callable as the base's are."""
    cls = getattr(importlib.import_module(asked["module"]), asked["class"])
    base = getattr(importlib.import_module(asked["contract"][0]), asked["contract"][1])
    wanted = sorted(getattr(base, "__abstractmethods__", ()))
    return {
        "is_one": issubclass(cls, base),
        "missing": sorted(getattr(cls, "__abstractmethods__", ())),
        "unlike": [name for name in wanted if not _takes(getattr(cls, name), getattr(base, name))],
        "constructor": len(inspect.signature(cls.__init__).parameters) - 1,
        "bases": [one.__name__ for one in cls.__mro__],
    }


def _takes(own: Callable[..., Any], theirs: Callable[..., Any]) -> bool:
    """Whether `own` can be called with all that `theirs` takes, by position and by name."""
    parameters = [p for p in inspect.signature(theirs).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    try:
        inspect.signature(own).bind(*([None] * len(parameters)))
        inspect.signature(own).bind(None, **{p.name: None for p in parameters[1:] if p.kind is not p.POSITIONAL_ONLY})
    except TypeError:
        return False
    return True


def _flags(asked: dict[str, Any]) -> dict[str, Any]:
    """The engine's own reading of its flags; what of it matters to a cache."""
    engine_args = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    parser = engine_args.add_cli_args(importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser())
    said, sys.stderr = sys.stderr, io.StringIO()
    try:
        arguments = parser.parse_args(asked["flags"])
    except SystemExit:
        raise ValueError(sys.stderr.getvalue().strip().splitlines()[-1]) from None
    finally:
        sys.stderr = said
    config = engine_args.from_cli_args(arguments).create_engine_config()
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    return {
        "block_tokens": cache.block_size,
        "hash": str(cache.prefix_caching_hash_algo),
        "prefix_caching": bool(cache.enable_prefix_caching),
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "tokens": model.max_model_len,
        "tensor": parallel.tensor_parallel_size,
        "pipeline": parallel.pipeline_parallel_size,
        "context": getattr(parallel, "decode_context_parallel_size", 1) * getattr(parallel, "prefill_context_parallel_size", 1),
        "hybrid": bool(model.is_hybrid),
        "latent": bool(model.use_mla),
        "layers": model.get_num_layers(parallel),
        "heads": model.get_num_kv_heads(parallel),
        "head": model.get_head_size(),
        "load_format": str(getattr(config.load_config, "load_format", "auto")),
        "model": str(model.model),
        "sliding": model.get_sliding_window() or 0,
        "identity": _identity(config, asked),
    }


def _identity(config: Any, asked: dict[str, Any]) -> str:
    """The digest of what the connector will put into the namespace from the configuration; empty where it can't be had."""
    try:
        facts = importlib.import_module("kvpool.connectors.vllm.facts").engine_facts(config, _engine(asked))
    except Exception:
        return ""  # the step `connector` tells why
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _transfer(asked: dict[str, Any]) -> bool:
    """Whether the engine takes the transfer configuration as it is spelled."""
    importlib.import_module("vllm.config").KVTransferConfig(**asked["transfer"])
    return True


if __name__ == "__main__":
    main()
