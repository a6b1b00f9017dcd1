"""Quest (Tang et al., arXiv 2406.10774): read the pages that may hold the highest scores, found by an upper bound.

Of every page of `page` tokens its channels' lowest and highest key values are kept: a side-car that follows from the prefix alone.
For a query q no token of the page can score more than ``sum_d max(q_d low_d, q_d high_d)``, which is ``q+ . high + q- . low`` with q+
and q- its positive and negative part. The pages with the highest bounds are read, the others skipped for this query only. Query
heads that share a KV head (and queries of one pass) share the pages: a page's bound is the highest of theirs. The last page,
still being filled, is always read. The first layers attend to nearly everything, so they read everything.
"""

import torch
from torch import Tensor

from kvpool.engine.attention.settings import QuestSettings
from kvpool.engine.attention.taint import Scope
from kvpool.engine.attention.technique import EVERYTHING, Selection, Traits

LEAST_PAGES = 3


class PageBounds:
    """One layer's `low` and `high` ``[kv_heads, pages, dim]`` of the `count` keys appended so far."""

    def __init__(self, page: int, keys: Tensor) -> None:
        heads, _, dim = keys.shape
        self.page = page
        self.count = 0
        self.low = keys.new_empty(heads, 0, dim)
        self.high = keys.new_empty(heads, 0, dim)
        self.append(keys)

    @property
    def pages(self) -> int:
        """Pages, the last of them possibly not full."""
        return self.low.shape[1]

    def append(self, keys: Tensor) -> None:
        """`keys` ``[kv_heads, n, dim]`` come behind those that are there."""
        heads, n, dim = keys.shape
        at = torch.arange(self.count, self.count + n, device=keys.device) // self.page
        self.count += n
        fresh = keys.new_full((heads, -(-self.count // self.page) - self.pages, dim), torch.inf)
        where = at[None, :, None].expand(heads, n, dim)
        self.low = torch.cat((self.low, fresh), dim=1).scatter_reduce(1, where, keys, "amin")
        self.high = torch.cat((self.high, -fresh), dim=1).scatter_reduce(1, where, keys, "amax")

    def bound(self, queries: Tensor) -> Tensor:
        """The most that a key of each page can score with each of `queries` ``[kv_heads, rows, dim]``, unscaled: ``[.., rows, pages]``."""
        positive, negative = queries.clamp(min=0), queries.clamp(max=0)
        return torch.matmul(positive, self.high.transpose(1, 2)) + torch.matmul(negative, self.low.transpose(1, 2))


class Quest:
    """An `AttentionIndex`: at most `budget` tokens (and at least three pages) per query and KV head."""

    def __init__(self, settings: QuestSettings) -> None:
        self.traits = Traits(scope=Scope.PREFIX)
        self._settings = settings
        self._budget: int | None = None
        self._layers: dict[int, PageBounds] = {}

    def append(self, layer: int, keys: Tensor) -> None:
        """Widen the bounds of the last page, begin new ones."""
        if layer < self._settings.dense:
            return
        if layer in self._layers:
            self._layers[layer].append(keys)
        else:
            self._layers[layer] = PageBounds(self._settings.page, keys)

    def settle(self, prompt: int) -> None:
        """The budget in tokens."""
        self._budget = self._settings.tokens(prompt)

    def query(self, layer: int, queries: Tensor) -> Selection:
        """The last page and those with the highest bounds."""
        bounds = self._layers.get(layer)
        if self._budget is None or bounds is None:  # a dense layer, or nothing there yet
            return EVERYTHING
        page = self._settings.page
        pages = max(self._budget // page, LEAST_PAGES)
        if pages >= bounds.pages:
            return EVERYTHING
        best = bounds.bound(queries).amax(dim=1)
        best[:, -1] = torch.inf
        chosen = best.topk(pages, dim=1).indices.sort(dim=1).values
        ids = chosen[:, :, None] * page + torch.arange(page, device=chosen.device)
        return Selection(ids.flatten(1)[:, : (pages - 1) * page + (bounds.count - 1) % page + 1])
