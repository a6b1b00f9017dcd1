"""How a rank begins: its tensors as pages, and whose blocks they are."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvpool.client.access import own_namespace
from kvpool.connectors.vllm.facts import check_groups, digest_of_weights, engine_facts, part_of, tensor_facts
from kvpool.connectors.vllm.messages import RankFacts
from kvpool.connectors.vllm.namespace import namespace_of
from kvpool.connectors.vllm.pages import HostPages, Pages
from kvpool.connectors.vllm.settings import Settings
from kvpool.errors import ConfigError
from kvpool.wire.credentials import PLAIN, Security

_WHO_S = 10.0


def open_rank(
    config: Any, kv_cache_config: Any, tensors: Mapping[str, Any], version: str, settings: Settings, security: Security
) -> tuple[RankFacts, Pages, bool]:
    """This rank's facts, its pages, and whether it saves them. With credentials a node must answer now, to say whose blocks these are.

    Raises `ConfigError`, and with credentials `AccessError` and `UnavailableError`.
    """
    block_tokens = check_groups(kv_cache_config.kv_cache_groups)
    pages = pages_of(tensors, kv_cache_config.num_blocks)
    part, saves = part_of(config, getattr(kv_cache_config, "kv_tp_replicas", 1))
    facts = engine_facts(config, version)
    facts |= tensor_facts(config, tensors, pages.layers, kv_cache_config.num_blocks, getattr(kv_cache_config, "kv_cache_layout", ""))
    namespace = namespace_of(
        facts,
        weights=digest_of_weights(config.model_config, str(config.load_config.load_format), settings.weights),
        layer_bytes=pages.layers.layer_bytes,
        block_tokens=block_tokens,
        part=part,
        salt=settings.salt.encode(),
    )
    if security != PLAIN:
        asking = own_namespace(settings.pool, namespace, security, _WHO_S)
        with ThreadPoolExecutor(1) as thread:  # the engine's own may have an event loop already
            namespace = thread.submit(asyncio.run, asking).result()
    return RankFacts(namespace, sum(pages.layers.layer_bytes)), pages, saves


def pages_of(tensors: Mapping[str, Any], blocks: int) -> Pages:
    """The pages of tensors on a CPU or a CUDA device. Raises `ConfigError` for others."""
    kinds = {getattr(getattr(tensor, "device", None), "type", "") for tensor in tensors.values()} - {""}
    if kinds == {"cuda"}:
        from kvpool.connectors.vllm.device_pages import cuda_pages

        return cuda_pages(tensors, blocks)
    if kinds != {"cpu"}:
        raise ConfigError(f"the KV lies on {' and '.join(sorted(kinds)) or 'nothing'}; what CPUs and CUDA devices hold can be stored")
    return HostPages(tensors, blocks)
