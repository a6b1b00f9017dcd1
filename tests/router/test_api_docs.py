"""The tables in docs/ are true."""

import re
from pathlib import Path

from click import Option

from router.api.schema import ChatBody, CompletionBody
from router.api.unsupported import unsupported_parameters
from router.main import main

ROOT = Path(__file__).parents[2]
API = (ROOT / "docs" / "api.md").read_text()
ROUTER = (ROOT / "docs" / "router.md").read_text()
SOURCES = {path: path.read_text() for path in (ROOT / "router").rglob("*.py") if "testing" not in path.parts}


def test_every_parameter_is_documented() -> None:
    """Supported ones in the table, refused ones in the list."""
    table = API.split("## Parameters")[1].split("Refused")[0]
    for name in {*ChatBody.model_fields, *CompletionBody.model_fields}:
        assert f"`{name}" in table, name
    refused = API.split("Refused with")[1].split("\n\n")[0]
    assert set(unsupported_parameters()) == set(re.findall(r"`([a-z_]+)`", refused)) - {"unsupported_parameter", "metadata", "store"}


def test_every_error_code_is_documented_and_made() -> None:
    """A caller may write its handling from the table alone."""
    table = set(re.findall(r"\| \d{3} \| `([a-z_]+)` \|", API))
    made = {code for text in SOURCES.values() for code in re.findall(r'code(?:: str \| None)?\s*=\s*"([a-z_]+)"', text)}
    assert table == made


def test_every_fallback_is_documented() -> None:
    """They are the labels of a metric and part of answers."""
    reasons = {
        reason
        for text in SOURCES.values()
        for call in re.findall(r"fell_back\((.*)\)", text)
        for reason in re.findall(r'"([a-z_]+)"', call)
    }
    assert reasons == set(re.findall(r"`([a-z_]+)`", API.split("other than planned:")[1].split("\n\n")[0]))


def test_every_flag_and_file_is_documented() -> None:
    """And nothing is documented that is not there."""
    flags = {option for parameter in main.params if isinstance(parameter, Option) for option in parameter.opts}
    assert flags == set(re.findall(r"`(--[a-z-]+)`", ROUTER.split("## Flags")[1].split("It joins")[0])) - {"--host`, `--port"}
    for name in re.findall(r"`([a-z_]+\.py)`", ROUTER):
        assert (ROOT / "router" / name).is_file(), name


def test_every_metric_is_documented() -> None:
    """An operator builds dashboards from the list."""
    text = SOURCES[ROOT / "router" / "metrics.py"]
    counters = {f"{name}_total" for name in re.findall(r'Counter\(name \+ "([a-z_]+)"', text)}
    others = set(re.findall(r'(?:Gauge|Histogram)\(name \+ "([a-z_]+)"', text))
    documented = ROUTER.split("## Metrics")[1]
    for name in counters | others:
        assert f"`{name}" in documented, name
