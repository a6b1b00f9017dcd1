"""H2O (Zhang et al., arXiv 2306.14048): the tokens that got the most attention so far, and the most recent ones.

Each token's account grows by the weights that queries pay it. A few tokens collect most of it (heavy hitters), and who was
heavy tends to stay so. After every pass a list that is over budget lets go of the lightest token outside the recent part; its account
is closed. Only queries that were computed count, never later ones. Query heads that share a KV head share its list and add up.

Two things differ from the paper unless asked for (`power=1,fade=0`). Weights count by their square: a token that a few queries need much
is worth more than one that all of them glance at. And accounts fade, by half in `fade` tokens, so that a token pays for what is
said now and not for having come first.

`score="mean"` divides an account by the queries that could have paid into it, which favours younger tokens; with
`heavy=1.0,power=1,fade=0` that is the observed attention of `kvpress`. The weights are computed here once more, from the keys that were
read: no attention kernel has to give them away.
"""

import torch
from torch import Tensor

from kvpool.engine.attention.partial import causal, scores
from kvpool.engine.attention.settings import H2OSettings
from kvpool.engine.attention.taint import Scope
from kvpool.engine.attention.technique import EVERYTHING, Seen, Selection, Traits
from kvpool.errors import LocalError


class _Accounts:
    """One layer: `ids` ``[kv_heads, kept]``, what each of them got, and the number of tokens so far."""

    def __init__(self, heads: int, device: torch.device, lasting: float) -> None:
        self.lasting = lasting
        """What is left of a payment one token later."""
        self.ids = torch.empty(heads, 0, dtype=torch.int64, device=device)
        self.mass = torch.empty(heads, 0, dtype=torch.float32, device=device)
        self.count = 0

    def join(self, paid: Tensor, new: int) -> None:
        """`new` tokens join; `paid` ``[kv_heads, group * new, kept + new]`` is what this pass's queries gave."""
        worth = self.lasting ** torch.arange(new - 1, -1, -1, dtype=torch.float32, device=paid.device)
        given = torch.matmul(worth.repeat(paid.shape[1] // new), paid)
        ids = torch.arange(self.count, self.count + new, device=self.ids.device).expand(len(self.ids), -1)
        self.ids = torch.cat((self.ids, ids), dim=1)
        self.mass = torch.cat((self.mass * self.lasting**new, self.mass.new_zeros(ids.shape)), dim=1) + given
        self.count += new

    def shrink(self, heavy: int, recent: int, mean: bool) -> None:
        """Keep `recent` newest and the `heavy` heaviest of the others."""
        older = self.ids.shape[1] - recent
        if older <= heavy:
            return
        account = self.mass / self._queries() if mean else self.mass
        kept = account[:, :older].topk(heavy, dim=1).indices.sort(dim=1).values
        last = torch.arange(older, older + recent, device=kept.device).expand(len(kept), -1)
        at = torch.cat((kept, last), dim=1)
        self.ids, self.mass = self.ids.gather(1, at), self.mass.gather(1, at)

    def _queries(self) -> Tensor:
        """How many queries could have paid into each account, older ones counted as far as they last."""
        age = self.count - self.ids
        return age if self.lasting == 1 else (1 - self.lasting**age) / (1 - self.lasting)


class H2O:
    """A `TokenSelector`: exactly `budget` tokens per layer and KV head once there are more."""

    def __init__(self, settings: H2OSettings) -> None:
        self.traits = Traits(scope=Scope.QUERIES, prompt_queries=settings.prompt_queries)
        self._settings = settings
        self._lasting = 0.5 ** (1 / settings.fade) if settings.fade else 1.0
        self._limits: tuple[int, int] | None = None
        self._layers: dict[int, _Accounts] = {}

    def update(self, layer: int, seen: Seen) -> None:
        """Pay, join, evict. Raises `LocalError` when the queries of earlier tokens were never shown."""
        heads, read, _ = seen.keys.shape
        accounts = self._layers.setdefault(layer, _Accounts(heads, seen.keys.device, self._lasting))
        before = read - seen.new
        if before != accounts.ids.shape[1]:
            raise LocalError(f"h2o was shown the queries of {accounts.count} tokens but {before} were read: it needs the whole prompt's")
        visible = causal(seen.queries.shape[1], before, seen.new, seen.keys.device)
        products = scores(seen.queries, seen.keys, seen.scale, visible)
        accounts.join(products.softmax(dim=-1).pow(self._settings.power), seen.new)
        self._shrink(accounts)

    def settle(self, prompt: int) -> None:
        """Evict down to the budget, of which at least one token is recent."""
        budget = max(self._settings.tokens(prompt), 1)
        heavy = int(budget * self._settings.heavy)
        self._limits = heavy, budget - heavy
        for accounts in self._layers.values():
            self._shrink(accounts)

    def keep(self, layer: int, past: int) -> Selection:
        """The heavy and the recent."""
        accounts = self._layers.get(layer)
        if accounts is None or accounts.count != past:
            raise LocalError(f"h2o was not shown the queries of all {past} tokens of layer {layer}: it needs the whole prompt's")
        return Selection(accounts.ids) if accounts.ids.shape[1] < past else EVERYTHING

    def _shrink(self, accounts: _Accounts) -> None:
        if self._limits is not None:
            accounts.shrink(*self._limits, mean=self._settings.score == "mean")
