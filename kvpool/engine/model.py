"""The model: weights and layers by `transformers`, wrapped so that one pass computes tokens of many sequences over a `KvStore`.

`load_model` believes nothing it can check. After loading it runs a few tokens and refuses a model that leaves a layer's K or
V unwritten (shared or missing caches), lets a later token change an earlier one's KV (not causal), or gives another
result when the same tokens come in two passes (its cache is not what we think).
"""

import logging
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from kvpool.block import Geometry, Namespace
from kvpool.engine.attention.rotation import moved
from kvpool.engine.cache import SequenceCache
from kvpool.engine.convert import stay_offline
from kvpool.engine.device.streams import Device
from kvpool.engine.identity import geometry_of, namespace_of
from kvpool.engine.packed import pack, padded
from kvpool.engine.paged.attention import NAME, Pass, Segment, register
from kvpool.engine.paged.store import TORCH_DTYPES, KvStore
from kvpool.errors import ConfigError

log = logging.getLogger(__name__)

STEADY_ROWS = 4
"""From so many rows on, a row of a product of matrices has the same bits whatever rows are beside it: the library takes the same kernel."""


class Model:
    """A causal language model, used by one thread at a time.

    A pass of equal segments over equal KV gives equal bits, on one machine with one thread count. With `steady`, or `packed` layers, the
    bits of a segment depend on that segment alone, whatever it is computed with.
    """

    def __init__(self, network: Any, namespace: Namespace, *, packed: bool = False, device: Device | None = None) -> None:
        self.namespace = namespace
        self.geometry: Geometry = namespace.geometry
        self.context_tokens = int(network.config.max_position_embeddings)
        self.vocabulary = int(network.config.vocab_size)
        self.device = device
        self._network = network
        self._place = torch.device("cpu") if device is None else device.place
        self._packed = packed

    def new_cache(self, *, capacity: int, limit: int) -> SequenceCache:
        """An empty cache for one sequence by itself."""
        return SequenceCache(self.geometry, capacity=capacity, limit=limit, device=self.device)

    @cached_property
    def frequencies(self) -> torch.Tensor | None:
        """How its keys turn with their position, as `attention.rotation.moved` wants it; None when they turn in another way.

        Found out by trying: equal tokens have equal keys in the first layer but for the rotation. Computes a pass when first asked.
        """
        turns = getattr(getattr(self._network.base_model, "rotary_emb", None), "inv_freq", None)
        if not isinstance(turns, torch.Tensor):
            return None
        cache = self.new_cache(capacity=8, limit=8)
        self.extend(cache, [1] * 8)
        keys = cache.arrays()[0][0].float()
        guess = torch.cat([moved(keys[:, :1], at, turns) for at in range(8)], dim=1)
        return turns if torch.allclose(guess, keys, rtol=0.05, atol=0.02 * float(keys.abs().max())) else None

    def run(self, store: KvStore, segments: Sequence[Segment], *, steady: bool = False) -> torch.Tensor:
        """Compute the KV of the segments' tokens into `store`, and the scores (logits) of the token after each segment that wants them.

        Returns float32 ``[segments that want scores, vocabulary]``, in their order, on the CPU.
        """
        tokens = [token for segment in segments for token in segment.tokens]
        places = [at for segment in segments for at in range(segment.start, segment.end)]
        wanted, end = [], 0
        for segment in segments:
            end += len(segment.tokens)
            if segment.scores:
                wanted.append(end - 1)
        lacking = self._rows(len(tokens), steady) - len(tokens)
        rows = wanted + wanted[-1:] * (self._rows(len(wanted), steady) - len(wanted))
        inputs = {
            "input_ids": torch.tensor([tokens + [0] * lacking], device=self._place),
            "position_ids": torch.tensor([places + [0] * lacking], device=self._place),
            "kvpool_pass": Pass(store, segments),
            "use_cache": False,
        }
        with torch.inference_mode():
            if not wanted:
                self._network.base_model(**inputs)
                store.passed()
                return torch.empty(0, self.vocabulary)
            kept = torch.tensor(rows, device=self._place)
            scores: torch.Tensor = self._network(**inputs, logits_to_keep=kept).logits[0, : len(wanted)]
            store.passed()
        return scores.float().cpu()

    def _rows(self, rows: int, steady: bool) -> int:
        """How many rows are computed for `rows` that are wanted."""
        return padded(rows) if self._packed else max(rows, STEADY_ROWS if steady else 0)

    def extend(self, cache: SequenceCache, tokens: Sequence[int]) -> None:
        """Append the KV of `tokens` to `cache`, in one pass."""
        self.run(cache.store, [cache.segment(tokens, scores=False)])
        cache.advance(len(tokens))

    def predict(self, cache: SequenceCache, tokens: Sequence[int]) -> torch.Tensor:
        """`extend`, and the scores (logits) of the token after them: float32 ``[vocabulary]``."""
        scores = self.run(cache.store, [cache.segment(tokens, scores=True)])
        cache.advance(len(tokens))
        return scores[0]


def load_model(directory: Path, *, dtype: str, block_tokens: int, packed: bool = True, device: Device | None = None) -> Model:
    """Load the Hugging Face directory `directory` (see `kvpool.config.models.resolve_model`) to `device`; `packed`: see `packed.py`.

    `device` None is the CPU, where alone layers can be packed.

    Raises `ConfigError` when it isn't a model this engine serves.
    """
    stay_offline()
    register()
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as chatter

    chatter.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{directory} can't be loaded as a model: {error}") from None
    geometry = geometry_of(config, dtype=dtype, block_tokens=block_tokens)
    namespace = namespace_of(directory, config, geometry)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside the library are not ours to act on
            network, report = AutoModelForCausalLM.from_pretrained(
                directory, dtype=TORCH_DTYPES[dtype], attn_implementation=NAME, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{directory} can't be loaded as a causal language model: {error}") from None
    if missing := sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"])):
        raise ConfigError(f"{directory} lacks weights the model needs, among them {missing[0]!r} ({len(missing)} in all)")
    network.eval().requires_grad_(False)
    layers = pack(network) if packed and device is None else 0
    log.info("%d linear layers packed", layers)
    if device is not None:
        network.to(device.place)
    model = Model(network, namespace, packed=layers > 0, device=device)
    _check(model)
    log.info("loaded %s: %d layers, %s, %d B of KV per token", directory, len(geometry.layers), dtype, geometry.bytes_per_token)
    return model


def _check(model: Model) -> None:
    """Refuse a model whose KV is not a function of the prefix alone, or not kept where we look for it."""
    size = 8
    tokens = [(7 * i + 3) % model.vocabulary for i in range(size)]

    def run(first: list[int], last: list[int]) -> tuple[torch.Tensor, ...]:
        cache = model.new_cache(capacity=size, limit=size)
        cache.poison()
        if first:
            model.extend(cache, first)
        return model.predict(cache, last), *(array.float() for array in cache.arrays())

    expected, *whole = run([], tokens)
    if not all(torch.isfinite(array).all() for array in whole):
        raise ConfigError("this model leaves some layer's keys or values unwritten; the engine serves plain causal decoders only")
    _, *changed = run([], [*tokens[:-1], (tokens[-1] + 1) % model.vocabulary])
    if not all(torch.equal(one[:, :, :-1], other[:, :, :-1]) for one, other in zip(whole, changed, strict=True)):
        raise ConfigError("in this model a token changes the KV of earlier ones; the engine serves causal decoders only")
    scores, *_ = run(tokens[:-2], tokens[-2:])
    if not torch.allclose(scores, expected, rtol=0.05, atol=0.05 * float(expected.abs().max())):
        raise ConfigError("this model answers differently when its cached tokens are reused; the engine can't serve it")
