"""Which processes make a local cluster, and with which flags."""

import re
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvpool.cluster.config import MAX_COPIES
from kvpool.errors import ConfigError
from kvpool.units import GIB, MIB

MAX_PROCESSES_PER_ROLE = 64
TRANSPORTS = ("auto", "shm", "ucx", "tcp", "grpc")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process of the table: `argv` is started as it stands; `stop_rank` orders the shutdown, lowest first."""

    role: str
    index: int
    argv: tuple[str, ...]
    stop_rank: int = 0

    @property
    def name(self) -> str:
        """What it is called in logs and on screen, such as `decode-0`."""
        return f"{self.role}-{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """What `kvpool up` can be told. Raises `ConfigError` for values no cluster can run with."""

    model: str = "smollm2"
    """`smollm2`, the directory of a Llama-family model, or a GGUF file."""
    nodes: int = 1
    prefill: int = 1
    decode: int = 1
    copies: int = 1
    """On how many nodes each block is to be."""
    capacity_bytes: int = GIB
    """Of each node."""
    ssd: Path | None = None
    """Directory under which each node keeps an SSD tier; None: memory only."""
    ssd_capacity_bytes: int = 16 * GIB
    """Of each node's SSD tier."""
    policy: str = ""
    """Eviction policy of the nodes by name; empty: their default."""
    host: str = "127.0.0.1"
    port: int = 8000
    """Of the router; 0 takes a free one."""
    transport: str = "auto"
    dtype: str = "float32"
    block_tokens: int = 16
    chunk_tokens: int = 256
    resident_bytes: int = 512 * MIB
    """KV of finished requests that each worker keeps to itself; 0 keeps none, so that every prefix comes from the pool."""
    request_timeout_s: float = 120.0
    restart: bool = True

    def __post_init__(self) -> None:
        for name in ("nodes", "prefill", "decode"):
            if not 0 <= getattr(self, name) <= MAX_PROCESSES_PER_ROLE:
                raise ConfigError(f"--{name} must be between 0 and {MAX_PROCESSES_PER_ROLE}, got {getattr(self, name)}")
        if self.decode < 1:
            raise ConfigError("a cluster needs at least one decode worker; set --decode 1")
        if not 1 <= self.copies <= MAX_COPIES:
            raise ConfigError(f"--copies must be between 1 and {MAX_COPIES}, got {self.copies}")
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"--transport must be one of {', '.join(TRANSPORTS)}, got {self.transport!r}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, got {self.port}")
        if self.resident_bytes < 0:
            raise ConfigError(f"resident_bytes can't be negative, got {self.resident_bytes}")
        for name in ("capacity_bytes", "ssd_capacity_bytes", "block_tokens", "chunk_tokens", "request_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")

    @property
    def served_model_name(self) -> str:
        """What clients call the model: `smollm2`, or the file's or directory's own name."""
        stem = Path(self.model.rstrip("/")).name.removesuffix(".gguf")
        return re.sub(r"[^A-Za-z0-9._-]+", "-", stem) or "model"


def local_processes(options: ClusterOptions, cluster_url: str) -> tuple[ProcessSpec, ...]:
    """The processes of a local cluster, in the order of their start. Nodes keep their id over restarts."""
    python = (sys.executable, "-m")
    common = ("--cluster", cluster_url)
    model = ("--model", options.model, "--served-model-name", options.served_model_name)
    shape = ("--block-tokens", str(options.block_tokens), "--chunk-tokens", str(options.chunk_tokens))
    worker = (
        *common,
        "--listen",
        "127.0.0.1:0",
        *model,
        "--dtype",
        options.dtype,
        *shape,
        "--transport",
        options.transport,
        "--resident",
        str(options.resident_bytes),
        "--threads",
        "1",
    )
    where = ("--host", options.host, "--port", str(options.port))
    router = (*common, *where, *model, "--request-timeout", f"{options.request_timeout_s:g}")
    specs: list[ProcessSpec] = []
    for index in range(options.nodes):
        where = ("--listen", "127.0.0.1:0", "--capacity", str(options.capacity_bytes))
        flags = (*common, *where, "--id", _node_id(options, index), *_storage(options, index))
        specs.append(ProcessSpec(role="node", index=index, argv=(*python, "kvpool.node", *flags), stop_rank=2))
    for role, count in (("prefill", options.prefill), ("decode", options.decode)):
        argv = (*python, f"{role}_worker", *worker)
        specs.extend(ProcessSpec(role=role, index=index, argv=argv, stop_rank=1) for index in range(count))
    specs.append(ProcessSpec(role="router", index=0, argv=(*python, "router", *router), stop_rank=0))
    return tuple(specs)


def _node_id(options: ClusterOptions, index: int) -> str:
    """Another one in each run; with an SSD tier always that of its directory, because who owns which block follows from it."""
    return uuid.uuid4().hex if options.ssd is None else uuid.uuid5(uuid.NAMESPACE_URL, f"{options.ssd.resolve()}#{index}").hex


def _storage(options: ClusterOptions, index: int) -> tuple[str, ...]:
    """A node's flags about tiers and eviction."""
    flags = ("--policy", options.policy) if options.policy else ()
    if options.ssd is None:
        return flags
    return (*flags, "--ssd", str(options.ssd / f"node-{index}"), "--ssd-capacity", str(options.ssd_capacity_bytes))


class _HasRole(Protocol):
    @property
    def role(self) -> str: ...


def roles_to_await(specs: Sequence[_HasRole], roles: Sequence[str]) -> dict[str, int]:
    """How many members of each of `roles` a cluster of `specs` has when it is complete."""
    counts = {role: sum(spec.role == role for spec in specs) for role in roles}
    return {role: count for role, count in counts.items() if count}
