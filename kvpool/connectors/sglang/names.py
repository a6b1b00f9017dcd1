"""What a page of SGLang's is called in the pool: its own hash, and in front of it what makes equal hashes mean unequal bytes.

SGLang's page hashes cover tokens and nothing else. So a name begins with 16 bytes of sha256 over texts that say which pool of the engine a
page is of (KV, Mamba states, ...), how its bytes lie (class of the host pool, layout, dtype, page size, layers, heads, bytes of each
object), and which part of a page this rank holds. The model is in the scope of the client.

*Ranks.* The KV of an MLA model is the same on all tensor-parallel ranks: SGLang lets one of them write it, and all find it. Mamba states
and draft models with heads are split also there, so they have their rank in the name. Pipeline stages and context-parallel ranks hold
different layers and tokens: theirs always are in it. With `tp_lcm_size` and the layout `page_head`, a rank's page is kept in as many
objects as it has parts of the finest division, under the names that the ranks of that division use, and deployments of several sizes share
them.
"""

import hashlib
import struct
from collections.abc import Iterable
from typing import Any

PREFIX_BYTES = 16
WHOLE = b"page"
"""The object that a whole page is kept in, where it isn't kept in the objects of its host pool."""
FORM = b"form"
"""What says how the tensor in `WHOLE` looked."""
ANCHOR = "kv"
"""The host pool that all others go with."""
_U32 = struct.Struct("<I")
_SPLIT_ANYWAY = ("mamba",)
_FACTS = ("layout", "dtype", "page_size", "start_layer", "end_layer", "layer_num", "head_dim", "v_head_dim", "kv_cache_dim")


def prefix_of(texts: Iterable[str]) -> bytes:
    """16 bytes for a list of texts: sha256 over u32 little-endian length and UTF-8 bytes of each."""
    digest = hashlib.sha256()
    for text in texts:
        raw = text.encode()
        digest.update(_U32.pack(len(raw)) + raw)
    return digest.digest()[:PREFIX_BYTES]


def is_replicated(config: Any, name: str, pool: Any) -> bool:
    """Whether all tensor-parallel ranks hold the same bytes in the host pool called `name`."""
    with_heads = hasattr(pool, "head_num") and not hasattr(pool, "kv_lora_rank")
    return bool(config.is_mla_model) and name not in _SPLIT_ANYWAY and not (name.startswith("draft") and with_heads)


def parts_of(config: Any, name: str, pool: Any) -> list[str]:
    """Which parts of a page this rank's objects of the host pool `name` are, one text a part: more than one where heads are split."""
    rest = f"pp={config.pp_rank}/{config.pp_size} cp={config.attn_cp_rank}/{config.attn_cp_size}"
    if is_replicated(config, name, pool):
        return [f"tp=all {rest}"]
    factor = split_factor(config, name)
    return [f"tp={config.tp_rank * factor + i}/{config.tp_size * factor} {rest}" for i in range(factor)]


def split_factor(config: Any, name: str) -> int:
    """Into how many parts by heads a page of the host pool `name` is split; 1 where it isn't."""
    return config.tp_lcm_size // config.tp_size if name == ANCHOR and config.should_split_heads else 1


def facts_of(config: Any, name: str, pool: Any, sizes: Iterable[int]) -> list[str]:
    """How the bytes of the pages of a host pool lie, whose objects have `sizes` bytes."""
    facts = [f"{fact}={getattr(pool, fact)}" for fact in _FACTS if getattr(pool, fact, None) is not None]
    heads = getattr(pool, "head_num", None)
    if heads is not None:
        facts.append(f"heads={heads // split_factor(config, name)}")
    return [f"pool={name}", f"class={type(pool).__name__}", *facts, f"bytes={','.join(map(str, sizes))}"]
