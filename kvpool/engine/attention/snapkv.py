"""SnapKV (Li et al., arXiv 2404.14469): what the end of the prompt looks at is what the answer will need.

The last `window` prompt tokens vote: what they pay each token (`worth.py`), averaged over them and over the query heads that share a
KV head, then over `kernel` neighbours, so that what stands beside an important token stays with it. Who has the most votes stays,
together with the most recent tokens, the share `recent` of the budget; that is decided once, when the prompt ends, and all later tokens
stay too. Only the window's queries are needed, so the rest of the prompt may come from a pool.

As published weights are what is paid, each head has a budget of its own, and the window is short and stays as a whole: for a budget of 256,
`window=32,recent=0.125,kernel=5,power=1,pay=weight,heads=own`.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kvpool.engine.attention.partial import causal, scores
from kvpool.engine.attention.settings import SnapKVSettings
from kvpool.engine.attention.taint import Scope
from kvpool.engine.attention.technique import EVERYTHING, Seen, Selection, Traits
from kvpool.engine.attention.worth import packed, payments, worthiest
from kvpool.errors import LocalError


class _Ballot:
    """One layer: the last queries ``[kv_heads, group, up to window, dim]``, their votes, and tokens counted or chosen so far."""

    def __init__(self) -> None:
        self.queries: Tensor | None = None
        self.votes: Tensor | None = None  # ``[kv_heads, count]``
        self.ids: Tensor | None = None
        self.real: Tensor | None = None  # which of the ids count
        self.count = 0


class SnapKV:
    """A `TokenSelector`: `budget` tokens of the prompt per layer and KV head, on average over the heads, and everything after it."""

    def __init__(self, settings: SnapKVSettings) -> None:
        self.traits = Traits(scope=Scope.QUERIES, prompt_queries=settings.prompt_queries)
        self._settings = settings
        self._settled = False
        self._layers: dict[int, _Ballot] = {}

    def update(self, layer: int, seen: Seen) -> None:
        """In the prompt, let the newest window vote; after it, the new tokens join."""
        ballot = self._layers.setdefault(layer, _Ballot())
        if not self._settled:
            self._vote(ballot, seen)
            ballot.count = seen.keys.shape[1]
        else:
            _join(ballot, seen.new)

    def settle(self, prompt: int) -> None:
        """Count the votes. Raises `LocalError` when part of the window was loaded and not computed."""
        self._settled = True
        budget = max(self._settings.tokens(prompt), 1)
        for ballot in self._layers.values():
            if ballot.count > budget:
                self._choose(ballot, budget)
            ballot.queries = ballot.votes = None

    def keep(self, layer: int, past: int) -> Selection:
        """The chosen, the most recent of the prompt, and what came after."""
        ballot = self._layers.get(layer)
        if ballot is None or ballot.count != past:
            raise LocalError(f"snapkv was not shown the end of the {past} tokens of layer {layer}")
        return EVERYTHING if ballot.ids is None else Selection(ballot.ids, ballot.real)

    def _vote(self, ballot: _Ballot, seen: Seen) -> None:
        heads, rows, dim = seen.queries.shape
        newest = seen.queries.view(heads, rows // seen.new, seen.new, dim)
        held = newest if ballot.queries is None else torch.cat((ballot.queries, newest), dim=2)
        ballot.queries = held[:, :, -self._settings.window :].clone()
        before = seen.keys.shape[1] - ballot.queries.shape[2]
        voters = ballot.queries.reshape(heads, -1, dim)
        visible = causal(voters.shape[1], before, ballot.queries.shape[2], seen.keys.device)
        paid = scores(voters, seen.keys, seen.scale, visible).softmax(dim=-1)
        ballot.votes = payments(paid, seen.values, self._settings.power, self._settings.pay).mean(dim=1)

    def _choose(self, ballot: _Ballot, budget: int) -> None:
        window, kernel, recent = self._settings.window, self._settings.kernel, int(budget * self._settings.recent)
        older = ballot.count - recent
        if ballot.queries is None or ballot.votes is None or ballot.queries.shape[2] < min(window, ballot.count):
            raise LocalError(f"snapkv needs the queries of the last {window} tokens of the prompt; they were not all computed here")
        pooled = functional.avg_pool1d(ballot.votes[:, :older], kernel, padding=kernel // 2, stride=1)
        ballot.ids, ballot.real = packed(worthiest(pooled, budget - recent, self._settings.heads))
        ballot.count = older
        _join(ballot, recent)


def _join(ballot: _Ballot, new: int) -> None:
    """The next `new` tokens join; where nothing was left out there is no list."""
    if ballot.ids is not None and ballot.real is not None:
        ids = torch.arange(ballot.count, ballot.count + new, device=ballot.ids.device).expand(len(ballot.ids), -1)
        ballot.ids = torch.cat((ballot.ids, ids), dim=1)
        ballot.real = torch.cat((ballot.real, ballot.real.new_ones(ids.shape)), dim=1)
    ballot.count += new
