"""The router as a process: flags in, a served socket out, a clean end on SIGTERM and SIGINT."""

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import ssl
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from kvpool.clock import MonotonicClock
from kvpool.cluster import Membership, open_membership
from kvpool.config.models import resolve_model
from kvpool.errors import ConfigError, KvpoolError, UnavailableError
from kvpool.policy.routing.names import OURS, POLICIES
from kvpool.units import SECOND, parse_size
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.flags import http_guard_options
from kvpool.wire.guard import OPEN, Guard
from kvpool.wire.pool_client import PoolRpc
from kvpool.wire.worker_client import WorkerClient
from router.assemble import application, build_router
from router.attention import parse_choices
from router.feeds import MemberFeeds, dial
from router.pool import NodesProbe
from router.probe import NoPool
from router.replicas.peers import LOADS_INFO
from router.replicas.service import Replicas
from router.server import BACKLOG, Server, ServerTls
from router.services import Services
from router.settings import Limits
from router.stock.feeds import EngineFeeds
from router.stock.place import EnginePlace
from router.stock.roster import EngineRoster
from router.text.model import TextModel

log = logging.getLogger("router")

_CONVERT_LIMIT_NS = 600 * SECOND
_JOIN_RETRY_S = 0.5
_DEFAULTS = Limits()
_ALONE = "memory://router"
"""The cluster of a router that uses stock engines and has no peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How to serve. `advertise` is the host others reach this router at; `engines`: stock ones, instead of the cluster's workers."""

    cluster: str
    host: str
    port: int
    advertise: str
    drain_timeout_s: int
    limits: Limits
    policy: str = OURS
    peer_port: int = 0
    guard: Guard = OPEN
    client_ca: Path | None = None
    record: Path | None = None
    engines: tuple[EnginePlace, ...] = ()
    attention_choices: frozenset[str] = frozenset()


async def serve(config: Config, model: TextModel) -> None:
    """Serve until SIGTERM or SIGINT, then let requests in flight finish for `drain_timeout_s`; a second signal ends them."""
    async with contextlib.AsyncExitStack() as stack:
        bound = stack.enter_context(_bind(config.host, config.port))
        membership = stack.enter_context(await asyncio.to_thread(open_membership, config.cluster))
        services = _services(config, model, membership, stack)
        await stack.enter_async_context(services.recorder.written(config.record, model.name, services.clock.now_ns()))
        dispatcher = services.dispatcher
        replicas = Replicas(membership, dispatcher.fleet, dispatcher.entrance.shared, config.guard, MonotonicClock())
        services.metrics.routers_heard.set_function(lambda: replicas.heard)
        tls = ServerTls.of(config.guard.security, config.client_ca)
        config.guard.check_listen(f"{config.host}:{config.port}")
        server = Server(application(services), config.drain_timeout_s, tls)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, _stop, server)
        scheme = "http" if tls is None else "https"
        loads = await replicas.start(config.host, config.peer_port, config.advertise)
        serving = asyncio.ensure_future(server.serve(sockets=[bound]))
        joining = asyncio.ensure_future(_join(server, membership, config.advertise, bound.getsockname()[1], scheme, loads))
        try:
            await serving
        finally:
            joining.cancel()
            await asyncio.wait({joining})
            await replicas.close()
            await asyncio.to_thread(membership.close)


def _services(config: Config, model: TextModel, membership: Membership, stack: contextlib.AsyncExitStack) -> Services:
    """Over the cluster's workers and nodes, or over stock engines."""
    security = config.guard.security
    build = partial(
        build_router,
        model=model,
        limits=config.limits,
        clock=MonotonicClock(),
        guard=config.guard,
        policy=config.policy,
        attention_choices=config.attention_choices,
        seed=secrets.randbits(32),
    )
    if config.engines:
        context = ssl.create_default_context(cafile=security.tls_ca)
        roster = EngineRoster(config.engines, model.name, MonotonicClock(), context)
        roster.start()
        stack.push_async_callback(roster.close)
        return build(view=roster, connect=roster.connect, probe=NoPool(), feed=EngineFeeds)
    return build(
        view=membership,
        connect=lambda address: WorkerClient(address, security),
        probe=NodesProbe(membership, lambda address: PoolRpc(address, security=security)),
        feed=lambda view, index: MemberFeeds(view, index, dial(security)),
        lease=lambda node: PoolRpc(node.address, NodeIdentity(node.id, node.incarnation), security),
    )


async def _join(server: Server, membership: Membership, host: str, port: int, scheme: str, loads: str) -> None:
    """Once requests are served, say so in the log and join the cluster; a store that is down is tried again."""
    await server.serving.wait()
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    info = {"url": f"{scheme}://{address}", LOADS_INFO: loads}
    log.info("serving on %s://%s", scheme, address)
    while True:
        try:
            await asyncio.to_thread(membership.join, role="router", address=address, info=info)
        except UnavailableError as error:
            log.warning("not a member yet: %s", error)
            await asyncio.sleep(_JOIN_RETRY_S)
        else:
            return


def _stop(server: Server) -> None:
    """First signal: drain. Second: now."""
    server.force_exit = server.should_exit
    server.should_exit = True


@contextlib.contextmanager
def _bind(host: str, port: int) -> Iterator[socket.socket]:
    """A bound TCP socket; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"can't listen on {host}:{port}: {error}; choose another --host or --port") from error
    with bound:
        yield bound


@click.command()
@click.option("--cluster", envvar="KVPOOL_CLUSTER", help="Cluster URL, for example redis://127.0.0.1:6379/0. With --engine: of routers.")
@click.option(
    "--engine", "engines", multiple=True, help="A stock vLLM server to use as a worker, http://host:port (docs/stock-engines.md)."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="Port to listen on; 0 takes a free one.")
@click.option("--advertise", default=None, help="Host at which others reach this router; --host by default (127.0.0.1 for a wildcard).")
@click.option("--peer-port", default=0, show_default=True, type=click.IntRange(0, 65535), help="Port for other routers; 0: a free one.")
@click.option("--model", required=True, help="smollm2, a model directory or a .gguf file: whose tokenizer and chat template to use.")
@click.option("--served-model-name", default=None, help="Name in the API and of the workers to use; the --model's last part by default.")
@click.option("--request-timeout", default=_DEFAULTS.request_timeout_s, show_default=True, help="Seconds a request may take in all.")
@click.option("--stall-timeout", default=_DEFAULTS.stall_timeout_s, show_default=True, help="Seconds a worker may be silent unquestioned.")
@click.option("--max-in-flight", default=_DEFAULTS.max_in_flight, show_default=True, help="Requests served at once; more get 429.")
@click.option("--max-body", default="4MiB", show_default=True, help="Largest request body; larger ones get 413.")
@click.option("--policy", default=OURS, show_default=True, type=click.Choice(list(POLICIES)), help="How a worker is chosen.")
@click.option("--max-queued", default=_DEFAULTS.max_queued, show_default=True, help="Requests that may wait for a worker; more get 429.")
@click.option("--prefill-slots", default=_DEFAULTS.prefill_slots, show_default=True, help="Requests given to a prefill worker at once.")
@click.option("--decode-slots", default=_DEFAULTS.decode_slots, show_default=True, help="Requests given to a decode worker at once.")
@click.option("--direct-tokens", default=_DEFAULTS.direct_tokens, show_default=True, help="Up to so many tokens to compute skip prefill.")
@click.option("--help-tokens", default=_DEFAULTS.help_tokens, show_default=True, help="Up to so many a decode worker may help with.")
@click.option(
    "--follow-tokens", default=_DEFAULTS.follow_tokens, show_default=True, help="From so many common tokens on one computes for all."
)
@click.option("--follow-timeout", default=_DEFAULTS.follow_timeout_s, show_default=True, help="Seconds to wait for who computes the same.")
@click.option("--prefetch-tokens", default=_DEFAULTS.prefetch_tokens, show_default=True, help="Tokens fetched for those in line; 0: none.")
@click.option("--slo-ttft", default=0.0, show_default=True, help="Seconds to the first token beyond which requests get 429; 0: no target.")
@click.option("--slo-tpot", default=0.0, show_default=True, help="Seconds between tokens beyond which requests get 429; 0: no target.")
@click.option("--key-rate", default=0.0, show_default=True, help="Requests a second that one API key may make; 0: any number.")
@click.option("--attention-choices", default="", help="Techniques that requests may choose, of full,streaming,h2o,snapkv,quest; none.")
@click.option("--drain-timeout", default=10, show_default=True, type=click.IntRange(1), help="Seconds for requests in flight at the end.")
@click.option("--log-level", default="info", show_default=True, type=click.Choice(["debug", "info", "warning", "error"]))
@click.option("--record", default=None, type=click.Path(path_type=Path), help="New file for what is served, hashed (docs/replay.md).")
@click.option("--https-client-ca", default=None, type=click.Path(path_type=Path), help="Serve only HTTPS clients with a certificate by it.")
@http_guard_options
def main(
    cluster: str | None,
    engines: tuple[str, ...],
    host: str,
    port: int,
    advertise: str | None,
    peer_port: int,
    model: str,
    served_model_name: str | None,
    policy: str,
    drain_timeout: int,
    log_level: str,
    https_client_ca: Path | None,
    record: Path | None,
    **flags: Any,
) -> None:
    """Serve OpenAI's API for one model of a kvpool cluster."""
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        if cluster is None and not engines:
            raise ConfigError("whose workers? give --cluster, or --engine for each stock engine")
        limits, choices = _limits(flags), parse_choices(flags["attention_choices"])
        places = tuple(EnginePlace.parse(engine) for engine in engines)
        directory = resolve_model(model, deadline_ns=time.monotonic_ns() + _CONVERT_LIMIT_NS)
        text = TextModel.load(directory, served_model_name or default_name(model))
        where = advertise or (host if host not in ("0.0.0.0", "::") else "127.0.0.1")
        config = Config(
            cluster=cluster or _ALONE,
            host=host,
            port=port,
            advertise=where,
            drain_timeout_s=drain_timeout,
            limits=limits,
            policy=policy,
            peer_port=peer_port,
            guard=Guard.open(flags),
            client_ca=https_client_ca,
            record=record,
            engines=places,
            attention_choices=choices,
        )
        _run(config, text)
    except KvpoolError as error:
        sys.exit(f"router: {error}")


def _limits(flags: dict[str, Any]) -> Limits:
    """From the flags that set one."""
    return Limits(
        request_timeout_s=flags["request_timeout"],
        stall_timeout_s=flags["stall_timeout"],
        max_in_flight=flags["max_in_flight"],
        max_body_bytes=parse_size(flags["max_body"]),
        max_queued=flags["max_queued"],
        prefill_slots=flags["prefill_slots"],
        decode_slots=flags["decode_slots"],
        direct_tokens=flags["direct_tokens"],
        help_tokens=flags["help_tokens"],
        follow_tokens=flags["follow_tokens"],
        follow_timeout_s=flags["follow_timeout"],
        prefetch_tokens=flags["prefetch_tokens"],
        slo_ttft_s=flags["slo_ttft"],
        slo_tpot_s=flags["slo_tpot"],
        key_requests_per_s=flags["key_rate"],
    )


def default_name(model: str) -> str:
    """The name a model is served under unless told otherwise: the last part of its path, without `.gguf`."""
    return Path(model).name.removesuffix(".gguf")


def _run(config: Config, text: TextModel) -> None:
    """On uvloop."""
    import uvloop

    uvloop.run(serve(config, text))
