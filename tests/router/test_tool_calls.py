"""Tool calls are found wherever pieces end, and nothing that is not one is lost."""

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.text.tool_calls import CLOSE, OPEN, ToolCall, ToolCallScanner


def _run(text: str, cuts: list[int], *, single: bool = False) -> tuple[str, list[ToolCall]]:
    scanner = ToolCallScanner(single=single)
    said, calls = "", []
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for start, end in pairwise(edges):
        fresh, found = scanner.push(text[start:end])
        said += fresh
        calls += found
    return said + scanner.finish(), calls


@given(st.lists(st.integers(0, 200), max_size=20))
def test_calls_between_text_are_found_whatever_the_pieces(cuts: list[int]) -> None:
    """White space around a call goes with it, other text stays."""
    text = f'One.\n{OPEN}\n{{"name": "f", "arguments": {{"x": "é"}}}}\n{CLOSE}\n{OPEN}{{"name": "g", "arguments": "raw"}}{CLOSE}\n'
    said, calls = _run(text, cuts)
    assert (said, calls) == ("One.", [ToolCall("f", '{"x": "é"}'), ToolCall("g", "raw")])


@given(st.text(alphabet="a <tol_cal>/\n", max_size=60), st.lists(st.integers(0, 60), max_size=10))
def test_text_without_a_call_comes_through_unchanged(text: str, cuts: list[int]) -> None:
    """Marks that begin and never end, or end what never began, are text."""
    assert _run(text, cuts) == (text, [])


@given(st.sampled_from(["", "5", "[]", "{}", '{"name": 5}', '{"arguments": {}}', "{" * 2000]), st.lists(st.integers(0, 60), max_size=5))
def test_what_is_no_call_stays_text(inside: str, cuts: list[int]) -> None:
    """The model may have said something else in these marks."""
    text = f"a{OPEN}{inside}{CLOSE}b"
    assert _run(text, cuts) == (text, [])


def test_call_without_arguments_has_an_empty_object() -> None:
    """Clients parse the field."""
    assert json.loads(_run(f'{OPEN}{{"name": "f"}}{CLOSE}', [])[1][0].arguments) == {}


def test_single_scanner_drops_what_follows_the_first_call() -> None:
    """The caller wants one."""
    text = f'{OPEN}{{"name": "f"}}{CLOSE} and {OPEN}{{"name": "g"}}{CLOSE}'
    assert _run(text, [], single=True) == ("", [ToolCall("f", "{}")])
