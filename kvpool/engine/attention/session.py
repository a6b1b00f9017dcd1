"""One sequence's attention under a technique: tell it the prompt, then let it decide what each pass reads, and remember the taint.

Use: while the prompt is computed, attention is the engine's own, and `observe` is told of each layer's pass. `settle` when the
prompt is over. From then on `attend` computes the attention. Layers come in order, once each per pass. A technique's state can't
be rebuilt from KV, so a sequence that is preempted takes its session along, or starts over with another.

The new tokens of a pass always see each other and themselves. What they read of earlier tokens is another partial attention, an
estimate of the rest a third, and the answer is their exact sum.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kvpool.engine.attention.dense import one_token
from kvpool.engine.attention.partial import attend, causal, grouped, merge, ungrouped
from kvpool.engine.attention.rotation import moved
from kvpool.engine.attention.taint import Taint
from kvpool.engine.attention.technique import Seen, Selection, Technique, TokenSelector, Traits
from kvpool.errors import LocalError


class AttentionSession:
    """`frequencies` are the model's rotation (see `rotation.moved`). `taint` says what of the sequence may be published."""

    def __init__(self, technique: Technique, *, frequencies: Tensor) -> None:
        self.traits: Traits = technique.traits
        self._technique = technique
        self._frequencies = frequencies
        self._known: dict[int, int] = {}
        self.settled = False
        self.taint = Taint()

    def observe(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> None:
        """The prompt's newest n tokens attended to everything: as `attend`, which is the engine's own then."""
        if self.settled:
            raise LocalError("the prompt is over; its passes can't be observed any more")
        self._tell(layer, Seen(grouped(queries, len(keys)), keys, values, queries.shape[1], scale))

    def settle(self, prompt: int) -> None:
        """The prompt of `prompt` tokens is computed, as far as it was not loaded."""
        self.settled = True
        self._technique.settle(prompt)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """The attention ``[heads, n, dim]`` of the newest n tokens; all `keys` and `values` ``[kv_heads, tokens, dim]``, theirs last."""
        if not self.settled:
            raise LocalError("a technique chooses after the prompt: settle first")
        heads, n, _ = queries.shape
        past = keys.shape[1] - n
        rows = grouped(queries, len(keys))
        selection = self._choose(layer, rows, keys[:, :past])
        if selection.ids is None or (selection.real is None and selection.ids.shape[1] == past):
            read, out = (keys, values), full_attention(queries, keys, values, scale)
        else:
            self.taint = self.taint.since(past)
            read, out = self._partly(selection, rows, keys, values, n, scale)
            out = ungrouped(out, heads)
        self._tell(layer, Seen(rows, *read, n, scale))
        return out

    def _choose(self, layer: int, rows: Tensor, past: Tensor) -> Selection:
        """What to read of the tokens whose keys are `past`; an index is given each of them once, before it is asked."""
        if isinstance(self._technique, TokenSelector):
            return self._technique.keep(layer, past.shape[1])
        if (known := self._known.get(layer, 0)) < past.shape[1]:
            self._technique.append(layer, past[:, known:])
            self._known[layer] = past.shape[1]
        return self._technique.query(layer, rows)

    def _tell(self, layer: int, seen: Seen) -> None:
        if isinstance(self._technique, TokenSelector):
            self._technique.update(layer, seen)

    def _partly(
        self, selection: Selection, rows: Tensor, keys: Tensor, values: Tensor, n: int, scale: float
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """The keys and values that are read, those of the new tokens last, and the attention of `rows`."""
        past = keys.shape[1] - n
        assert selection.ids is not None
        at = selection.ids.to(keys.device)[:, :, None].expand(len(keys), -1, keys.shape[2])
        old, new = keys.gather(1, at), keys[:, past:]
        old_values, new_values = values.gather(1, at), values[:, past:]
        if selection.by:
            first = moved(old[:, : selection.moved], selection.by, self._frequencies)
            old = torch.cat((first, old[:, selection.moved :]), dim=1)
        visible = None if n == 1 else causal(rows.shape[1], 0, n, keys.device)
        real = None if selection.real is None else selection.real[:, None].expand(-1, rows.shape[1], -1)
        parts = [attend(rows, old, old_values, scale, real), attend(rows, new, new_values, scale, visible)]
        if selection.estimate is not None:
            parts.append(selection.estimate)
        return (torch.cat((old, new), dim=1), torch.cat((old_values, new_values), dim=1)), merge(parts).out


def full_attention(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention ``[heads, n, dim]`` of the last n of the tokens over all of them."""
    n, tokens = queries.shape[1], keys.shape[1]
    if n == 1:
        return one_token(queries[None], keys[None], values[None], scale)[0]
    visible = None if n == tokens else causal(n, tokens - n, n, keys.device)
    return functional.scaled_dot_product_attention(
        queries[None], keys[None], values[None], attn_mask=visible, is_causal=n == tokens, scale=scale, enable_gqa=True
    )[0]
