"""A technique from its settings."""

from kvpool.engine.attention.h2o import H2O
from kvpool.engine.attention.quest import Quest
from kvpool.engine.attention.settings import AttentionSettings, H2OSettings, QuestSettings, SnapKVSettings, StreamingSettings
from kvpool.engine.attention.snapkv import SnapKV
from kvpool.engine.attention.streaming import Streaming
from kvpool.engine.attention.technique import Technique


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
