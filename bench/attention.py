"""What leaving tokens out does to a model's answers: KL to full attention, of techniques beside each other on equal budgets.

`python -m bench.attention [--json] [--texts NAME,...] [--budget 0.25] [--suffix 64] [--steps 24]`. SmolLM2 reads a prompt of 1,024
tokens of each text (`attention_texts.py`, a minute or two a text) with full attention, then every technique chooses, and the next
tokens are forced: the mean of KL(full || technique) over their predictions, in nats, on the same tokens, of two kinds
(`../shared/specs/techniques.md` 4.2b and 7):

    continued   the prompt is the beginning of a text, and the text goes on: what will be needed is not known when tokens are chosen
    asked       the prompt is a text and, at its end, a question about it; forced is the answer that full attention gives

A suffix is computed in one pass, so the choice is that of the prompt's end. The column *by token* forces the first text's answer one
token a pass, as a decode does: H2O evicts, a window slides, and Quest chooses anew each time. The random choice draws tokens per
layer and head. SnapKV chooses by the prompt's end, so its goal is about what is asked; the others' are about what is continued. A figure
is the ratio of two means over the texts; beside it stand the lowest and the highest ratio that a text gave.

Checked besides, on the tensors of the first text: no key scores above its page's bound (float64), and the kept tokens are
those of `kvpress`, if it is installed.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.attention_texts import TEXTS
from bench.peers.kvpress_sets import Shown, agreement
from bench.report import print_json, print_table
from kvpool.config.models import resolve_model
from kvpool.engine.attention.build import make_technique
from kvpool.engine.attention.network import read_prompt, score, use_sessions
from kvpool.engine.attention.quest import PageBounds
from kvpool.engine.attention.session import AttentionSession
from kvpool.engine.attention.settings import parse_attention
from kvpool.engine.attention.taint import Scope
from kvpool.engine.attention.technique import Seen, Selection, Technique, TokenSelector, Traits
from kvpool.engine.convert import stay_offline
from kvpool.units import SECOND

PREFIX, SHOWN_LAYERS = 1024, (0, 3, 11, 20, 29)
BEFORE, AFTER = "<|im_start|>user\n", "\n\n{}<|im_end|>\n<|im_start|>assistant\n"
SPECS: Mapping[str, str] = {
    "full": "streaming:budget=100000",
    "h2o": "h2o:budget={}",
    "h2o, as published": "h2o:budget={},heavy=0.5,power=1,fade=0,pay=weight,heads=own",
    "snapkv": "snapkv:budget={}",
    "snapkv, as published": "snapkv:budget={},window=32,recent=0.125,kernel=5,power=1,pay=weight,heads=own",
    "quest": "quest:budget={}",
    "streaming": "streaming:budget={}",
    "streaming, positions of the text": "streaming:budget={},positions=original",
    "window alone": "streaming:budget={},sinks=0",
}
GOALS = {"streaming_over_window_kl": 1 / 4, "h2o_over_random_kl": 1 / 5, "h2o_over_streaming_kl": 1 / 2, "snapkv_over_streaming_kl": 1 / 2}


class Random:
    """A `TokenSelector`: the first `sinks` tokens, the last `recent`, and others by chance, the share `budget` of the prompt in all."""

    def __init__(self, heads: int, budget: float, sinks: int = 0, recent: int = 0) -> None:
        self.traits = Traits(scope=Scope.POSITIONS)
        self._heads, self._budget, self._sinks, self._recent = heads, budget, sinks, recent
        self._prompt = 0
        self._draw = torch.Generator().manual_seed(1)
        self._kept: dict[int, Tensor] = {}

    def update(self, layer: int, seen: Seen) -> None:
        """Nothing to learn."""

    def settle(self, prompt: int) -> None:
        """From now on."""
        self._prompt = prompt

    def keep(self, layer: int, past: int) -> Selection:
        """The draw of this layer, and all tokens after the prompt."""
        if layer not in self._kept:
            luck = torch.rand(self._heads, self._prompt, generator=self._draw)
            luck[:, : self._sinks] = luck[:, self._prompt - self._recent :] = 2
            self._kept[layer] = luck.topk(int(self._prompt * self._budget), dim=1).indices.sort(dim=1).values
        after = torch.arange(self._prompt, past).expand(self._heads, -1)
        return Selection(torch.cat((self._kept[layer], after), dim=1))


class Everybody:
    """A `TokenSelector` that shows one prompt to several, and keeps what some layers showed."""

    def __init__(self, selectors: Sequence[TokenSelector]) -> None:
        self.traits = Traits(scope=Scope.QUERIES)
        self.shown: dict[int, Shown] = {}
        self._selectors = selectors

    def update(self, layer: int, seen: Seen) -> None:
        """Tell all of them."""
        for selector in self._selectors:
            selector.update(layer, seen)
        if layer in SHOWN_LAYERS:
            self.shown[layer] = Shown(seen.queries.clone(), seen.keys.clone(), seen.scale)

    def settle(self, prompt: int) -> None:
        """Each settles in a session of its own."""

    def keep(self, layer: int, past: int) -> Selection:
        """It only listens."""
        return Selection(None)


def techniques(kv_heads: int, budget: float) -> dict[str, Technique]:
    """A new one of each."""
    made: dict[str, Technique] = {}
    for name, text in SPECS.items():
        settings = parse_attention(text.format(budget))
        assert settings is not None
        made[name] = make_technique(settings)
    return made | {"random": Random(kv_heads, budget), "random, 4 sinks, 32 recent": Random(kv_heads, budget, 4, 32)}


def load() -> tuple[Any, Tokenizer]:
    stay_offline()
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as chatter

    chatter.disable_progress_bar()
    directory = resolve_model("smollm2", deadline_ns=time.monotonic_ns() + 240 * SECOND)
    network = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    use_sessions(network)
    return network, Tokenizer.from_file(str(directory / "tokenizer.json"))


def kl(reference: Tensor, scores: Tensor) -> float:
    """Mean over tokens of KL(reference || scores), nats."""
    p, q = reference.double().log_softmax(-1), scores.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def one_pass(network: Any, cache: Any, tokens: list[int], session: AttentionSession | None) -> Tensor:
    """The scores after each of `tokens`; `cache` is as before."""
    scores = score(network, cache, tokens, session)
    cache.crop(-len(tokens))
    return scores


def by_token(network: Any, cache: Any, tokens: list[int], session: AttentionSession | None) -> Tensor:
    """The same, one token a pass."""
    scores = torch.cat([score(network, cache, [token], session) for token in tokens])
    cache.crop(-len(tokens))
    return scores


Suffix = Callable[[Any, Any, list[int], AttentionSession | None], Tensor]


def continued(tokenizer: Tokenizer, text: str, suffix: int) -> list[int]:
    """The first tokens of `text`: a prefix, and `suffix` more."""
    return list(tokenizer.encode(text).ids[: PREFIX + suffix])


def asked(network: Any, tokenizer: Tokenizer, text: str, question: str, suffix: int) -> list[int]:
    """As much of `text` as fits with the question, and the first tokens (at most `suffix`) of the answer by full attention."""
    from transformers import DynamicCache

    before, body, after = (tokenizer.encode(part).ids for part in (BEFORE, text, AFTER.format(question)))
    tokens = [*before, *body[: PREFIX - len(before) - len(after)], *after]
    cache = DynamicCache()
    read_prompt(network, cache, tokens[:-1], None)
    while len(tokens) < PREFIX + suffix and tokens[-1] != network.config.eos_token_id:
        tokens.append(int(score(network, cache, tokens[-1:], None)[-1].argmax()))
    return tokens


def measure(network: Any, tokens: list[int], budget: float, suffix: Suffix) -> tuple[dict[str, float], dict[int, Shown]]:
    """KL of each technique on `tokens`, of which those behind the prefix are forced, and what some layers showed."""
    from transformers import DynamicCache

    frequencies = network.base_model.rotary_emb.inv_freq
    made = techniques(network.config.num_key_value_heads, budget)
    everybody = Everybody([one for one in made.values() if isinstance(one, TokenSelector)])
    cache = DynamicCache()
    read_prompt(network, cache, tokens[:PREFIX], AttentionSession(everybody, frequencies=frequencies))
    reference = suffix(network, cache, tokens[PREFIX:], None)
    found = {}
    for name, technique in made.items():
        if name == "quest" and suffix is one_pass:
            continue  # it chooses for a query, not for a hundred
        session = AttentionSession(technique, frequencies=frequencies)
        session.settle(PREFIX)
        found[name] = kl(reference, suffix(network, cache, tokens[PREFIX:], session))
        assert name == "full" or session.taint.publishable(len(tokens)) == PREFIX
    return found, everybody.shown


def above_bound(shown: Mapping[int, Shown], page: int = 16) -> tuple[int, int]:
    """How many (query, page) have a key that scores above the page's bound, of how many."""
    above = total = 0
    for layer in shown.values():
        keys, queries = layer.keys.double(), layer.queries[:, ::7].double()
        bound = PageBounds(page, keys).bound(queries)
        best = torch.matmul(queries, keys.transpose(1, 2)).reshape(*bound.shape, page).amax(-1)
        above += int((best > bound * (1 + 1e-12 * bound.sign())).sum())
        total += bound.numel()
    return above, total


def ratios(*, continued: Mapping[str, float], asked: Mapping[str, float]) -> dict[str, float]:
    """The figures the goals are about."""
    return {
        "streaming_over_window_kl": continued["streaming"] / continued["window alone"],
        "h2o_over_random_kl": continued["h2o"] / continued["random"],
        "h2o_over_streaming_kl": continued["h2o"] / continued["streaming"],
        "snapkv_over_streaming_kl": asked["snapkv"] / asked["streaming"],
    }


def mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.attention", description="KL to full attention at equal budgets.")
    parser.add_argument("--texts", default=",".join(TEXTS), help="which ones: " + ", ".join(TEXTS))
    parser.add_argument("--budget", type=float, default=0.25, help="share of the prompt that is kept")
    parser.add_argument("--suffix", type=int, default=64, help="tokens forced in one pass")
    parser.add_argument("--steps", type=int, default=24, help="tokens forced one by one, of the first answer; 0 for none")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    names = args.texts.split(",")
    if not set(names) <= set(TEXTS) or not 1 <= args.suffix <= 128 or not 0 < args.budget < 1 or args.steps < 0:
        parser.error(f"--texts are of {', '.join(TEXTS)}; --suffix 1 to 128, --budget a share below 1, --steps not negative")
    torch.set_num_threads(1)
    network, tokenizer = load()
    rows: dict[str, list[dict[str, float]]] = {"continued": [], "asked": []}
    shown: Mapping[int, Shown] = {}
    stepped: dict[str, float] = {}
    for name in names:
        text = TEXTS[name].read()
        answer = asked(network, tokenizer, text, TEXTS[name].question, args.suffix)
        found, layers = measure(network, continued(tokenizer, text, args.suffix), args.budget, one_pass)
        rows["continued"].append(found)
        rows["asked"].append(measure(network, answer, args.budget, one_pass)[0])
        if not shown:
            shown = layers
            stepped = measure(network, answer[: PREFIX + args.steps], args.budget, by_token)[0] if args.steps else {}
    means = {kind: mean(of) for kind, of in rows.items()}
    above, pages = above_bound(shown)
    figures = ratios(**means)
    each = [ratios(continued=one, asked=other) for one, other in zip(rows["continued"], rows["asked"], strict=True)]
    ranges = {figure: (min(one[figure] for one in each), max(one[figure] for one in each)) for figure in figures}
    print(f"mean KL(full || technique), nats, after {PREFIX} tokens, of which {args.budget:.0%} are kept; {len(names)} texts")
    report(means, stepped, figures, ranges)
    peer = agreement(shown)
    print(f"\nquest: {above} of {pages} pages hold a key above their bound; kept sets as kvpress: {peer}")
    if args.json:
        print_json({
            "bench": "attention", **figures, "kl": means, "kl_by_token": stepped, "budget": args.budget, "prefix": PREFIX,
            "ranges": ranges, "kl_per_text": {kind: dict(zip(names, of, strict=True)) for kind, of in rows.items()},
            "quest_above_bound": above, "quest_pages": pages, "kvpress": peer, "suffix": args.suffix,
        })  # fmt: skip


def report(
    means: Mapping[str, Mapping[str, float]],
    stepped: Mapping[str, float],
    figures: Mapping[str, float],
    ranges: Mapping[str, tuple[float, float]],
) -> None:
    """Two tables."""
    columns = [*means.values(), stepped]
    cells = [(name, *(f"{one[name]:.4f}" if name in one else "-" for one in columns)) for name in techniques(1, 0.5)]
    print_table(("technique", *means, "by token"), cells)
    print()
    lines = [(name, f"{value:.3f}", "{:.2f} to {:.2f}".format(*ranges[name]), f"{GOALS[name]:.2f}") for name, value in figures.items()]
    print_table(("ratio", "value", "of single texts", "goal"), lines)


if __name__ == "__main__":
    main()
