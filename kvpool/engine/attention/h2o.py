"""H2O (Zhang et al., arXiv 2306.14048): the tokens that got the most attention so far, and the most recent ones.

Each token's account grows by what queries pay it (`worth.py`). A few tokens collect most of it (heavy hitters), and who was
heavy tends to stay so. After every pass a list that is over budget lets go of the lightest token outside the recent part; its account
is closed. Only queries that were computed count, never later ones. Query heads that share a KV head share its list and add up.

As published (`power=1,fade=0,pay=weight,heads=own`) queries pay their weights for ever, and each head has a budget of its own. Here they
pay what a token adds to their output, squared: one that a few queries need much is worth more than one that all of them glance at.
Accounts fade, by half in `fade` tokens, so that a token pays for what is said now and not for having come first. And the heads of a layer
share their budget: the lightest of them all leaves.

`score="mean"` divides an account by the queries that could have paid into it, which favours younger tokens; with
`heavy=1.0,power=1,fade=0,pay=weight,heads=own` that is the observed attention of `kvpress`. The weights are computed here once more, from
the keys that were read: no attention kernel has to give them away.
"""

import torch
from torch import Tensor

from kvpool.engine.attention.partial import causal, scores
from kvpool.engine.attention.settings import H2OSettings
from kvpool.engine.attention.taint import Scope
from kvpool.engine.attention.technique import EVERYTHING, Seen, Selection, Traits
from kvpool.engine.attention.worth import packed, payments, worthiest
from kvpool.errors import LocalError


class _Accounts:
    """One layer: `ids` ``[kv_heads, kept]``, which of them are `real`, what each got, and the number of tokens so far."""

    def __init__(self, heads: int, device: torch.device, lasting: float) -> None:
        self.lasting = lasting
        """What is left of a payment one token later."""
        self.ids = torch.empty(heads, 0, dtype=torch.int64, device=device)
        self.real = torch.empty(heads, 0, dtype=torch.bool, device=device)
        self.mass = torch.empty(heads, 0, dtype=torch.float32, device=device)
        self.held = self.count = 0
        """Tokens of all heads that are kept; tokens so far."""

    def join(self, paid: Tensor, new: int) -> None:
        """`new` tokens join; `paid` ``[kv_heads, group * new, kept + new]`` is what this pass's queries gave."""
        worth = self.lasting ** torch.arange(new - 1, -1, -1, dtype=torch.float32, device=paid.device)
        given = torch.matmul(worth.repeat(paid.shape[1] // new), paid)
        ids = torch.arange(self.count, self.count + new, device=self.ids.device).expand(len(self.ids), -1)
        self.ids = torch.cat((self.ids, ids), dim=1)
        self.real = torch.cat((self.real, self.real.new_ones(ids.shape)), dim=1)
        self.mass = torch.cat((self.mass * self.lasting**new, self.mass.new_zeros(ids.shape)), dim=1) + given
        self.count += new
        self.held += ids.numel()

    def shrink(self, settings: H2OSettings, heavy: int, recent: int) -> None:
        """Keep `recent` newest and the `heavy` heaviest of the others, a head."""
        heads, older = len(self.ids), self.ids.shape[1] - recent
        if self.held <= (heavy + recent) * heads:
            return
        account = self.mass / self._queries() if settings.score == "mean" else self.mass
        kept, real = packed(worthiest(account.masked_fill(~self.real, -1.0)[:, :older], heavy, settings.heads))
        last = torch.arange(older, older + recent, device=kept.device).expand(heads, -1)
        at = torch.cat((kept, last), dim=1)
        self.ids, self.mass = self.ids.gather(1, at), self.mass.gather(1, at)
        self.real = torch.cat((real, real.new_ones(last.shape)), dim=1)
        self.held = (heavy + recent) * heads

    def _queries(self) -> Tensor:
        """How many queries could have paid into each account, older ones counted as far as they last."""
        age = self.count - self.ids
        return age if self.lasting == 1 else (1 - self.lasting**age) / (1 - self.lasting)


class H2O:
    """A `TokenSelector`: exactly `budget` tokens per layer and KV head once there are more, on average over the heads."""

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
        if self._limits is not None:
            visible = visible & torch.cat((accounts.real, accounts.real.new_ones(heads, seen.new)), dim=1)[:, None]
        weights = scores(seen.queries, seen.keys, seen.scale, visible).softmax(dim=-1)
        accounts.join(payments(weights, seen.values, self._settings.power, self._settings.pay), seen.new)
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
        return Selection(accounts.ids, accounts.real) if accounts.held < past * len(accounts.ids) else EVERYTHING

    def _shrink(self, accounts: _Accounts) -> None:
        if self._limits is not None:
            accounts.shrink(self._settings, *self._limits)
