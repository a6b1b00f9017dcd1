"""Our techniques' kept tokens beside those of `kvpress`, on the same keys and queries: the share of lists that are equal.

kvpress runs in an environment of its own, `$PEERS_HOME/v-kvpress`; without it there is nothing to compare.
"""

import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.pool_peers import Peer
from kvpool.engine.attention.build import make_technique
from kvpool.engine.attention.partial import causal, scores
from kvpool.engine.attention.settings import parse_attention
from kvpool.engine.attention.technique import Seen, TokenSelector

PEER = Peer("v-kvpress", "bench.peers.kvpress", (), "torch kvpress")
SAME = {
    "streaming": "streaming:budget=0.25",
    "snapkv": "snapkv:budget=0.25,window=32,recent=0.125,kernel=5,power=1,pay=weight,heads=own",
    "h2o": "h2o:budget=0.25,heavy=1.0,score=mean,power=1,fade=0,pay=weight,heads=own",
}
"""Settings under which ours is the same choice: kvpress' nearest to H2O has no recent part and divides by age."""


@dataclass(frozen=True, slots=True)
class Shown:
    """One layer's `queries` ``[kv_heads, group * tokens, dim]`` and `keys` ``[kv_heads, tokens, dim]`` of a whole prompt."""

    queries: Tensor
    keys: Tensor
    scale: float

    def attention(self) -> Tensor:
        """The softmax weights ``[heads, tokens, tokens]``."""
        tokens = self.keys.shape[1]
        visible = causal(self.queries.shape[1], 0, tokens, self.keys.device)
        return scores(self.queries, self.keys, self.scale, visible).softmax(dim=-1).reshape(-1, tokens, tokens)


def agreement(shown: Mapping[int, Shown]) -> dict[str, object] | str:
    """Per technique the share of (layer, head) lists equal to kvpress', or how to install it."""
    if not PEER.python.exists():
        return f"not installed: {PEER.install}"
    tokens = next(iter(shown.values())).keys.shape[1]
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory, "in.pt"), Path(directory, "out.pt")
        layers = {layer: {"keys": one.keys, "attention": one.attention()} for layer, one in shown.items()}
        torch.save({"kept": tokens // 4, "layers": layers}, source)
        subprocess.run([*PEER.command, str(source), str(target)], check=True, timeout=120)
        answer = torch.load(target)
    theirs = answer["kept"]
    return {"version": answer["version"], **{name: share(shown, text, theirs[name]) for name, text in SAME.items()}}


def share(shown: Mapping[int, Shown], text: str, theirs: Mapping[int, Tensor]) -> float:
    """The share of lists that a technique of settings `text` has in common with `theirs`."""
    settings = parse_attention(text)
    assert settings is not None
    selector = make_technique(settings)
    assert isinstance(selector, TokenSelector)
    for layer, one in shown.items():
        selector.update(layer, Seen(one.queries, one.keys, one.keys, one.keys.shape[1], one.scale))  # weights alone: values aren't read
    tokens = next(iter(shown.values())).keys.shape[1]
    selector.settle(tokens)
    equal: list[bool] = []
    for layer, other in theirs.items():
        ids = selector.keep(layer, tokens).ids
        assert ids is not None
        equal += (ids.expand_as(other) == other).all(dim=1).tolist()
    return sum(equal) / len(equal)
