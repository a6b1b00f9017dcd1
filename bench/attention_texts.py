"""What `bench.attention` reads: twelve texts of four kinds that lie on every machine that has this repository and Python.

Chosen by kind and length before anything was measured on them with the present settings: prose, this project's own documents, a licence,
Python's language reference, and source code. Each has a question whose answer is in its first thousand tokens.
"""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

from kvpool.cli.conversation import DOCUMENT

ROOT = Path(__file__).parents[1]


class Text(NamedTuple):
    """Where a text is read from, and what is asked about it."""

    read: Callable[[], str]
    question: str


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text()


TEXTS: Mapping[str, Text] = {
    "handbook": Text(DOCUMENT.read_text, "When was the first light lit, and by whom?"),
    "readme": Text((ROOT / "README.md").read_text, "What does `make demo` start?"),
    "operate": Text((ROOT / "docs" / "operate.md").read_text, "What does `kvpool drain` do?"),
    "tiers": Text((ROOT / "docs" / "tiers.md").read_text, "Which tiers are there, and where does each keep its blocks?"),
    "licence": Text((ROOT / "LICENSE").read_text, "What does each Contributor grant to You?"),
    "statements": Text(lambda: topics["compound"], "When is the else clause of a while statement executed?"),
    "types": Text(lambda: topics["types"], "Which types have a single value, and what are they for?"),
    "debugger": Text(lambda: topics["debugger"], "How is a program entered into the debugger?"),
    "formats": Text(lambda: topics["formatstrings"], "What is a replacement field?"),
    "heapq": Text(lambda: _source("heapq"), "What does heappushpop do?"),
    "textwrap": Text(lambda: _source("textwrap"), "What does the attribute drop_whitespace do?"),
    "statistics": Text(lambda: _source("statistics"), "What does the function fmean compute?"),
}
