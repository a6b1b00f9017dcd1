"""A `transformers` model whose attention is a session's: an attention function by name, and the two passes of a request.

The function is one sequence at a time (batch 1) and takes its session from the call's arguments, so one model serves any number of
sequences, each with a technique of its own, or none.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from kvpool.engine.attention.build import make_technique
from kvpool.engine.attention.session import AttentionSession, full_attention
from kvpool.engine.attention.settings import AttentionSettings
from kvpool.errors import LocalError

ATTENTION = "kvpool_session"
"""The `attn_implementation` to ask for, after `use_sessions`."""


def use_sessions(network: Any) -> None:
    """Let `network`'s layers attend through the `session=` of each call."""
    AttentionInterface.register(ATTENTION, _forward)
    network.set_attn_implementation(ATTENTION)


def new_session(network: Any, settings: AttentionSettings) -> AttentionSession:
    """A session for one sequence of `network`, which has rotary positions."""
    return AttentionSession(make_technique(settings), frequencies=network.base_model.rotary_emb.inv_freq)


def read_prompt(network: Any, cache: Any, tokens: Sequence[int], session: AttentionSession | None) -> None:
    """Compute the next `tokens` of a prompt into `cache`. Call `session.settle` after the last of them."""
    with torch.inference_mode():
        network.base_model(input_ids=_batch(network, tokens), cache=cache, use_cache=True, session=session)


def score(network: Any, cache: Any, tokens: Sequence[int], session: AttentionSession | None) -> Tensor:
    """Compute `tokens` behind what is in `cache`; the scores of the token after each of them, float32 ``[tokens, vocabulary]``."""
    with torch.inference_mode():
        output = network(input_ids=_batch(network, tokens), cache=cache, use_cache=True, session=session)
    scores: Tensor = output.logits[0].float()
    return scores


def _forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **others: Any
) -> tuple[Tensor, None]:
    """What a layer of `transformers` calls: ``[1, heads, n, dim]`` and ``[1, kv_heads, tokens, dim]``, to ``[1, n, heads, dim]``."""
    if len(query) != 1:
        raise LocalError(f"a session is of one sequence; this pass has {len(query)}")
    session: AttentionSession | None = others["session"]
    queries, keys, values = query[0], key[0], value[0]
    if session is not None and session.settled:
        out = session.attend(module.layer_idx, queries, keys, values, scaling)
    else:
        out = full_attention(queries, keys, values, scaling)
        if session is not None:
            session.observe(module.layer_idx, queries, keys, values, scaling)
    return out.transpose(0, 1)[None].contiguous(), None


def _batch(network: Any, tokens: Sequence[int]) -> Tensor:
    return torch.tensor([list(tokens)], dtype=torch.long, device=network.device)
