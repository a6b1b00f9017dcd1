"""A technique from its settings, and what reads with it.

A model's keys must turn as Llama's do for sinks to be read elsewhere than they stand (`rotation.py`). For a model whose keys don't
(`frequencies` None) that one setting is refused; everything else works with any model.
"""

from torch import Tensor, empty

from kvpool.engine.attention.h2o import H2O
from kvpool.engine.attention.quest import Quest
from kvpool.engine.attention.reader import SessionReader
from kvpool.engine.attention.session import AttentionSession
from kvpool.engine.attention.settings import AttentionSettings, H2OSettings, QuestSettings, SnapKVSettings, StreamingSettings
from kvpool.engine.attention.snapkv import SnapKV
from kvpool.engine.attention.streaming import Streaming
from kvpool.engine.attention.technique import Technique
from kvpool.errors import ConfigError


def make_technique(settings: AttentionSettings) -> Technique:
    """A new one, for one sequence."""
    match settings:
        case StreamingSettings():
            return Streaming(settings)
        case H2OSettings():
            return H2O(settings)
        case SnapKVSettings():
            return SnapKV(settings)
        case QuestSettings():
            return Quest(settings)


def make_reader(settings: AttentionSettings, *, frequencies: Tensor | None, prompt: int) -> SessionReader:
    """The reader of a new sequence whose prompt has `prompt` tokens; `frequencies` are its model's (`Model.frequencies`)."""
    check_attention(settings, frequencies)
    turns = empty(0) if frequencies is None else frequencies
    return SessionReader(AttentionSession(make_technique(settings), frequencies=turns), prompt=prompt)


def check_attention(settings: AttentionSettings | None, frequencies: Tensor | None) -> None:
    """Raise `ConfigError` when the model with these `frequencies` can't be read with `settings`."""
    if frequencies is None and isinstance(settings, StreamingSettings) and settings.positions == "cache":
        raise ConfigError("this model's keys don't turn as Llama's do, so sinks can't be moved; use streaming:positions=original")
