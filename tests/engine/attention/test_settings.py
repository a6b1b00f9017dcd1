"""Techniques by name: a request says one short text, and a wrong one is refused with what there is."""

import subprocess
import sys

import pytest

from kvpool.engine.attention.build import make_technique
from kvpool.engine.attention.h2o import H2O
from kvpool.engine.attention.quest import Quest
from kvpool.engine.attention.settings import (
    TECHNIQUES,
    H2OSettings,
    QuestSettings,
    SnapKVSettings,
    StreamingSettings,
    parse_attention,
)
from kvpool.engine.attention.snapkv import SnapKV
from kvpool.engine.attention.streaming import Streaming
from kvpool.errors import ConfigError


def test_parse_attention_reads_names_and_settings() -> None:
    """What isn't said has its default."""
    assert parse_attention("full") is None
    assert parse_attention("snapkv:budget=0.1") == SnapKVSettings(budget=0.1)
    assert parse_attention("streaming:budget=512,sinks=2,positions=original") == StreamingSettings(
        budget=512, sinks=2, positions="original"
    )
    assert parse_attention("h2o:score=mean,heavy=1") == H2OSettings(score="mean", heavy=1)
    assert parse_attention("quest") == QuestSettings(budget=0.25, page=16, dense=2)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_settings_print_as_what_parses_to_them(name: str) -> None:
    """So that a text can be logged, sent and compared."""
    settings = parse_attention(f"{name}:budget=77")
    assert parse_attention(str(settings)) == settings
    assert settings != parse_attention(name)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there are full, streaming, h2o, snapkv, quest"),
        ("full:budget=1", "no attention technique"),
        ("nonsense", "'nonsense'"),
        ("quest:pages=3", "it has budget, page, dense"),
        ("quest:page=many", "not a number"),
        ("quest:page=1.5", "not a number"),
        ("quest:page=0", "page is at least 1"),
        ("quest:dense=-1", "negative"),
        ("h2o:budget=0", "a share up to 1"),
        ("h2o:budget=1.5", "a share up to 1"),
        ("h2o:budget=nan", "a share up to 1"),
        ("h2o:budget=inf", "a share up to 1"),
        ("h2o:budget=0.5,budget=0.5", "twice"),
        ("h2o:heavy=1.1", "heavy"),
        ("h2o:power=0", "power is 1 to 4"),
        ("h2o:fade=-1", "fade can't be negative"),
        ("snapkv:power=5", "power is 1 to 4"),
        ("snapkv:recent=-0.1", "recent is a share"),
        ("snapkv:pay=gold", "pay is one of output, weight"),
        ("h2o:heads=all", "heads is one of shared, own"),
        ("h2o:score=max", "one of sum, mean"),
        ("streaming:sinks=-1", "negative"),
        ("streaming:positions=there", "one of cache, original"),
        ("snapkv:kernel=4", "odd"),
        ("snapkv:window=0", "window"),
        ("snapkv:window=100000", "at most 1024"),
        ("snapkv:kernel=1000000001", "at most 255"),
        ("quest:page=100000", "at most 4096"),
        ("quest:dense=99999999999", "over 1073741824"),
        ("streaming:sinks=99999999999", "over 1073741824"),
        ("streaming:budget=1e300", "whole tokens"),
    ],
)
def test_parse_attention_refuses_with_a_reason(text: str, says: str) -> None:
    """Nobody gets another technique than they asked for."""
    with pytest.raises(ConfigError) as caught:
        parse_attention(text)
    assert says in str(caught.value)


def test_budget_is_a_share_or_a_number() -> None:
    """A share is rounded down."""
    assert H2OSettings(budget=0.25).tokens(1023) == 255
    assert H2OSettings(budget=1.0).tokens(1023) == 1023
    assert H2OSettings(budget=300).tokens(1023) == 300


def test_make_technique_makes_each() -> None:
    """The registry and the settings list the same."""
    made = [type(make_technique(kind())) for kind in TECHNIQUES.values()]
    assert made == [Streaming, H2O, SnapKV, Quest]


def test_settings_know_what_their_technique_must_see() -> None:
    """A router reads it off the settings, an engine off the technique."""
    for text, queries in (("streaming", 0), ("h2o", None), ("snapkv:window=7", 7), ("quest", 0)):
        settings = parse_attention(text)
        assert settings is not None
        assert settings.prompt_queries == queries == make_technique(settings).traits.prompt_queries


def test_settings_and_taint_load_no_torch() -> None:
    """A router or a command line may check a text without a second's import."""
    code = "import sys, kvpool.engine.attention.settings, kvpool.engine.attention.taint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
