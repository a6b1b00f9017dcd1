"""The attention of a pass: `transformers` calls it for each layer, it keeps the new K and V and reads those of each sequence.

Theory. A pass computes tokens of several sequences at once: one row of `input_ids`, sequence after sequence, each with as many new
tokens as its turn gives it (a chunk of a prompt, or one decoded token). The linear layers see one long row, which is what makes a batch
cheap; only attention knows where a sequence begins. It is registered under `NAME` in the `AttentionInterface` of transformers, so a
model's own code calls it, after rotary embedding, with keys and values of the new tokens; they go to their slots in the `KvStore`, and
each sequence's queries attend to that sequence's keys alone. No `Cache` of transformers is involved.

A sequence's `Reader`, when it has one, stands between its keys and its queries: there a technique chooses what is attended to.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from kvpool.engine.attention.dense import one_token, one_token_rows
from kvpool.engine.paged.store import KvStore, Piece, pieces
from kvpool.errors import ConfigError

NAME = "kvpool"


class Reader(Protocol):
    """What a sequence attends to, instead of all that came before."""

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, start: int, scale: float | None
    ) -> torch.Tensor:
        """The output ``[1, heads, q, v_dim]`` of queries ``[1, heads, q, k_dim]`` at positions `start` and following.

        `keys` and `values` are those of positions 0 .. start + q - 1, ``[1, kv_heads, start + q, dim]``, to be read only.
        """
        ...


class Gate(Protocol):
    """Holds a pass back until a layer's earlier KV is there; for `waited_ns` so far."""

    waited_ns: int

    def wait(self, layer: int) -> None:
        """Return when the KV of `layer` can be attended to; raise when it won't come."""
        ...


@dataclass(slots=True, eq=False)
class Segment:
    """The next `tokens` of one sequence, whose first `start` tokens have KV in `blocks`; the blocks have room for the new ones.

    `scores`: whether the scores of the token after the last one are wanted. `owner`: a number of the sequence's own, see `KvStore.read`.
    """

    blocks: Sequence[int]
    start: int
    tokens: Sequence[int]
    scores: bool = True
    reader: Reader | None = None
    gate: Gate | None = None
    owner: int | None = None
    runs: list[Piece] = field(init=False)

    def __post_init__(self) -> None:
        self.runs = pieces(self.blocks)

    @property
    def end(self) -> int:
        """Tokens that have KV when the pass is done."""
        return self.start + len(self.tokens)


class Pass:
    """The segments that are computed together, and where in `store` their KV lies."""

    def __init__(self, store: KvStore, segments: Sequence[Segment]) -> None:
        self._store = store
        self._segments = segments
        size = store.geometry.block_tokens
        slots = [segment.blocks[at // size] * size + at % size for segment in segments for at in range(segment.start, segment.end)]
        place = store.keys.device
        self._slots = torch.tensor(slots, device=place)
        self._masks = [_mask(segment.start, len(segment.tokens), place) for segment in segments]
        self._steps = [
            store.planes(segment.runs, segment.end)
            if len(segment.tokens) == 1 and segment.reader is None and segment.gate is None
            else None
            for segment in segments
        ]
        """Of decode steps that read in place, keys and values of all layers."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Outputs ``[1, n, heads, v_dim]`` for queries ``[1, heads, n, k_dim]`` of all segments, behind each other.

        `n` may exceed the tokens of all segments; what is beyond them is padding.
        """
        store, total, spec = self._store, len(self._slots), self._store.geometry.layers[0]
        if (key.shape[1], key.shape[3], value.shape[3]) != (spec.kv_heads, spec.k_dim, spec.v_dim):
            raise ConfigError(f"the model has keys {tuple(key.shape)} and values {tuple(value.shape)}: not its geometry")
        store.write(layer, self._slots, key[0, :, :total], value[0, :, :total])
        output = value.new_zeros(query.shape[2], query.shape[1], value.shape[3])
        steps = [step is not None for step in self._steps]
        rows, places = one_token_rows(query, output, spec.kv_heads) if any(steps) else ((), ())
        at = 0
        for segment, mask, step in zip(self._segments, self._masks, self._steps, strict=True):
            if step is not None:
                places[at].copy_(scaled_dot_product_attention(rows[at], step[0][layer], step[1][layer], scale=scale))
                at += 1
                continue
            if segment.gate is not None:
                segment.gate.wait(layer)
            behind = at + len(segment.tokens)
            keys, values = store.read(layer, segment.owner, segment.blocks, segment.runs, segment.end)
            part = query[:, :, at:behind]
            if segment.reader is not None:
                found = segment.reader.attend(layer, part, keys, values, start=segment.start, scale=scale)
            elif behind - at == 1:
                found = one_token(part, keys, values, scale)
            else:
                found = scaled_dot_product_attention(part, keys, values, mask, is_causal=segment.start == 0, scale=scale, enable_gqa=True)
            output[at:behind] = found[0].transpose(0, 1)
            at = behind
        return output[None]


def _mask(start: int, count: int, place: torch.device) -> torch.Tensor | None:
    """Which keys each of `count` queries at `start` sees: ``[count, start + count]``; None where all do, or a plain triangle."""
    if start == 0 or count == 1:
        return None
    return torch.ones(count, start + count, dtype=torch.bool, device=place).tril(start)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kvpool_pass: Pass | None = None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls for each layer of a pass that was given as `kvpool_pass`. Raises `ConfigError` for what we don't do."""
    if kvpool_pass is None:
        raise ConfigError("this model doesn't hand arguments on to its attention; the engine can't serve it")
    odd = [name for name in ("softcap", "sliding_window", "s_aux", "position_bias") if more.get(name) is not None]
    if odd or attention_mask is not None:
        raise ConfigError(f"this model's attention wants {odd or 'a mask of its own'}; the engine serves plain causal attention only")
    return kvpool_pass.attend(module.layer_idx, query, key, value, scaling), None


def register() -> None:
    """Make `NAME` known to transformers as an `attn_implementation`. Again: nothing new."""
    AttentionInterface.register(NAME, attend)
