"""The command line of both workers: flags in, exit status out.

What takes seconds to import (torch, transformers) is imported after the flags have been checked and the model has been found.
"""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import click

from kvpool.client.choose import AUTO, REACHES
from kvpool.cluster.url import parse_cluster_url
from kvpool.config.models import resolve_model
from kvpool.engine.attention.settings import FULL, parse_attention
from kvpool.engine.identity import DTYPES
from kvpool.engine.settings import EngineSettings, Role, WorkerConfig
from kvpool.errors import KvpoolError
from kvpool.units import SECOND, parse_size
from kvpool.wire.flags import guard_options
from kvpool.wire.guard import Guard

log = logging.getLogger(__name__)

_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--cluster",
        envvar="KVPOOL_CLUSTER",
        default=None,
        help="Cluster URL (redis://host:port/0?cluster=name); without it there is no pool.",
    ),
    click.option("--listen", default="127.0.0.1:0", show_default=True, help="Address to serve at; port 0 takes a free one."),
    click.option("--model", default="smollm2", show_default=True, help="smollm2, a Hugging Face directory, or a .gguf file."),
    click.option("--served-model-name", default=None, help="What clients call the model; its file's name by default."),
    click.option("--dtype", default="float32", show_default=True, type=click.Choice(DTYPES), help="Of weights, compute and KV."),
    click.option("--block-tokens", default=16, show_default=True, type=click.IntRange(1, 512), help="Tokens per block."),
    click.option("--chunk-tokens", default=256, show_default=True, type=click.IntRange(1), help="Tokens per prefill pass."),
    click.option(
        "--tpot-target",
        default=0.0,
        show_default=True,
        type=click.FloatRange(0, 1e6, max_open=True),
        help="Milliseconds between an answer's tokens, in the mean, that prompts beside it leave it; 0: no target.",
    ),
    click.option("--transport", default=AUTO, show_default=True, type=click.Choice((AUTO, *REACHES)), help="How blocks move."),
    click.option("--device", default="cpu", show_default=True, help="What computes and keeps KV: cpu, cuda, cuda:0..."),
    click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="Cores per pass of the model."),
    click.option("--max-active", default=64, show_default=True, type=click.IntRange(1), help="Requests served at once."),
    click.option("--max-queued", default=256, show_default=True, type=click.IntRange(0), help="Requests that may wait; more are refused."),
    click.option("--kv-memory", default="8GiB", show_default=True, help="KV that active requests may reserve."),
    click.option("--resident", default="512MiB", show_default=True, help="KV of finished requests to keep; 0 keeps none."),
    click.option(
        "--layout",
        default="paged",
        show_default=True,
        type=click.Choice(("paged", "vattention")),
        help="How scattered blocks are read: gathered, or mapped into one piece (CPU).",
    ),
    click.option("--packed/--mapped", default=True, show_default=True, help="Weights laid out for speed, or shared with other workers."),
    click.option("--deterministic", is_flag=True, help="Scores that depend, to the bit, on nobody a request is computed with."),
    click.option("--load-timeout", default=600.0, show_default=True, help="Seconds to find (and once convert) the model."),
    click.option("--drain", default=3.0, show_default=True, help="Seconds requests may go on after SIGTERM."),
)
_ATTENTION = click.option(
    "--attention",
    default=FULL,
    show_default=True,
    help="What answers read of their context unless a request says: full, streaming, h2o, snapkv or quest (docs/attention.md).",
)
"""Of decode workers: a prompt is always read whole."""


def command(role: Role) -> click.Command:
    """`python -m {role}_worker`."""

    def run(**flags: Any) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave)  # until the event loop takes over
        try:
            config = _config(role, flags)
            directory = resolve_model(flags["model"], deadline_ns=time.monotonic_ns() + int(flags["load_timeout"] * SECOND))
            _run(config, directory, dtype=flags["dtype"], block_tokens=flags["block_tokens"], packed=flags["packed"])
        except KvpoolError as error:
            sys.exit(f"{role}_worker: {error}")

    run = guard_options(run)
    for option in reversed((*_OPTIONS, _ATTENTION) if role == "decode" else _OPTIONS):
        run = option(run)
    return click.command(help=f"Run one {role} worker until SIGTERM or SIGINT.", name=f"{role}_worker")(run)


def _run(config: WorkerConfig, directory: Path, **how: Any) -> None:
    from kvpool.engine.device.streams import open_device
    from kvpool.engine.model import load_model
    from kvpool.engine.worker import serve

    asyncio.run(serve(config, load_model(directory, device=open_device(config.settings.device), **how)))


def _config(role: Role, flags: dict[str, Any]) -> WorkerConfig:
    if flags["cluster"] is not None:
        parse_cluster_url(flags["cluster"])
    return WorkerConfig(
        role=role,
        served_name=flags["served_model_name"] or Path(flags["model"].rstrip("/")).name.removesuffix(".gguf"),
        cluster=flags["cluster"],
        listen=flags["listen"],
        transport=flags["transport"],
        drain_s=flags["drain"],
        guard=Guard.open(flags),
        settings=EngineSettings(
            threads=flags["threads"],
            chunk_tokens=flags["chunk_tokens"],
            tpot_target_ms=flags["tpot_target"],
            max_active=flags["max_active"],
            max_queued=flags["max_queued"],
            kv_bytes=parse_size(flags["kv_memory"]),
            resident_bytes=parse_size(flags["resident"]),
            steady=flags["deterministic"],
            layout=flags["layout"],
            device=flags["device"],
            attention=parse_attention(flags.get("attention", FULL)),
        ),
    )


def _leave(number: int, frame: FrameType | None) -> None:
    """Told to stop while loading: nothing is served yet, nothing has to be given back."""
    log.info("stopped by signal %d before serving", number)
    sys.exit(0)
