"""What a cluster agrees on: settings as people write them, text as the store keeps it, and refusal of the rest."""

import json
from dataclasses import fields
from typing import Any

import pytest

from kvpool.cluster.config import MAX_CONFIG_BYTES, MAX_NAMESPACES, ClusterConfig
from kvpool.errors import ConfigError, ProtocolError
from kvpool.units import MIB

FINGERPRINT = "0123456789abcdef" * 2
CONFIG = ClusterConfig(version=3, copies=2, namespace_copies={FINGERPRINT: 1}, handover_s=2.5)
TEXT = (
    '{"copies":2,"extent_tokens":512,"handover_s":2.5,"hot_reads":256,"namespace_copies":{"0123456789abcdef0123456789abcdef":1},'
    '"near_copies":true,"rebalance_bytes_per_s":268435456,"v":1,"version":3}'
)


def test_config_golden_text() -> None:
    """Processes of different releases share it, and the scripts in the store read the version out of this spelling."""
    assert CONFIG.encode() == TEXT
    assert ClusterConfig.decode(TEXT.encode()) == CONFIG


def test_config_of_a_later_release_keeps_what_is_known_here() -> None:
    """During a rolling upgrade the old processes still follow the settings that they understand."""
    assert ClusterConfig.decode(json.dumps({**json.loads(TEXT), "colour": "red"})) == CONFIG
    assert ClusterConfig.decode('{"v":1,"version":1}') == ClusterConfig(version=1)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("copies", "3", 3),
        ("extent_tokens", "1024", 1024),
        ("handover_s", "10", 10.0),
        ("handover_s", "1m30s", 90.0),
        ("rebalance_bytes_per_s", "512MiB", 512 * MIB),
        ("hot_reads", "0", 0),
        ("near_copies", "false", False),
    ],
)
def test_config_setting_as_people_write_it(name: str, text: str, value: Any) -> None:
    """Sizes and durations have units; everything else stays as it was, the version too."""
    changed = CONFIG.with_setting(name, text)
    assert getattr(changed, name) == value
    assert {each.name for each in fields(ClusterConfig) if getattr(changed, each.name) != getattr(CONFIG, each.name)} == {name}


def test_config_copies_of_a_namespace_are_its_own_or_those_of_all() -> None:
    """A namespace can be worth more copies, or fewer, and be forgotten again."""
    other = "f" * 32
    config = CONFIG.with_setting(f"namespace_copies.{other}", "4")
    assert [config.copies_of(name) for name in (FINGERPRINT, other, "0" * 32)] == [1, 4, 2]
    assert config.with_setting(f"namespace_copies.{other}", "default") == CONFIG
    assert config.settings()[f"namespace_copies.{other}"] == 4
    assert "version" not in config.settings()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("copies", "0", r"copies must be 1\.\.16"),
        ("copies", "17", r"copies must be 1\.\.16"),
        ("copies", "two", "whole number"),
        ("copies", "1.5", "whole number"),
        ("extent_tokens", "0", "extent_tokens must be"),
        ("handover_s", "soon", "not a duration"),
        ("handover_s", "nan", "handover_s must be"),
        ("handover_s", "-1", "handover_s must be"),
        ("rebalance_bytes_per_s", "fast", "not a size"),
        ("rebalance_bytes_per_s", "1", "rebalance_bytes_per_s must be"),
        ("near_copies", "yes", "true or false"),
        ("version", "9", "no setting 'version'"),
        ("colour", "red", "there are copies, extent_tokens"),
        ("namespace_copies.short", "2", "32 lowercase hex digits"),
        ("namespace_copies." + FINGERPRINT, "0", r"must be 1\.\.16"),
        ("namespace_copies." + FINGERPRINT, "many", "whole number"),
    ],
)
def test_config_setting_that_makes_no_sense_is_refused(name: str, text: str, words: str) -> None:
    """The message says what would do."""
    with pytest.raises(ConfigError, match=words):
        CONFIG.with_setting(name, text)


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"version": 0},
        {"version": "1"},
        {"version": 2**53},
        {"copies": True},
        {"copies": None},
        {"near_copies": 1},
        {"handover_s": "30"},
        {"namespace_copies": []},
        {"namespace_copies": {"x": 1}},
        {"namespace_copies": {FINGERPRINT: 1.0}},
        {"namespace_copies": {f"{number:032x}": 1 for number in range(MAX_NAMESPACES + 1)}},
    ],
)
def test_config_text_with_a_bad_field_is_refused(change: dict[str, object]) -> None:
    """What stands in the store is input like any other."""
    with pytest.raises(ProtocolError):
        ClusterConfig.decode(json.dumps({**json.loads(TEXT), **change}))


@pytest.mark.parametrize("text", [b"", b"\xff", b"[]", b"null", b"{}", b"[" * 5000, TEXT.encode()[:-1], b" " * (MAX_CONFIG_BYTES + 1)])
def test_config_text_that_is_no_config_is_refused(text: bytes) -> None:
    """Truncated, huge, deeply nested or binary: one error, no crash."""
    with pytest.raises(ProtocolError):
        ClusterConfig.decode(text)


def test_config_of_the_largest_size_fits_its_limit() -> None:
    """What may be set can be stored and read back."""
    config = ClusterConfig(version=2**53 - 1, namespace_copies={f"{number:032x}": 16 for number in range(MAX_NAMESPACES)})
    assert ClusterConfig.decode(config.encode()) == config
