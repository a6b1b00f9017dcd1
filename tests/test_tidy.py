"""Style is a test: sizes, docstring-free stubs, forbidden patterns."""

import ast
import statistics
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("kvpool", "prefill_worker", "decode_worker", "router", "bench", "tests")
GENERATED = ROOT / "kvpool" / "wire" / "gen"


def _files() -> list[Path]:
    return [p for room in ROOMS for p in sorted((ROOT / room).rglob("*.py")) if GENERATED not in p.parents]


def _functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_files_stay_small() -> None:
    """A file is one idea: median at most 150 lines, none over 500."""
    lengths = {p: len(p.read_text().splitlines()) for p in _files()}
    assert {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > 500} == {}
    assert statistics.median(lengths.values()) <= 150


@pytest.mark.parametrize("path", _files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_stay_short(path: Path) -> None:
    """No function is longer than a screen and a half (70 lines)."""
    long = {f.name: f.end_lineno - f.lineno + 1 for f in _functions(path) if f.end_lineno and f.end_lineno - f.lineno >= 70}
    assert long == {}


@pytest.mark.parametrize("path", _files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_swallowed_errors_and_no_stubs(path: Path) -> None:
    """`except Exception: pass`, bare except, NotImplementedError and postponed work don't get in."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"bare except at line {node.lineno}"
            broad = isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            silent = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
            assert not (broad and silent), f"swallowed error at line {node.lineno}"
    if path != Path(__file__):
        for word in ("NotImplementedError", "TODO", "FIXME", "XXX"):
            assert word not in text


@pytest.mark.parametrize("path", [p for p in _files() if "tests" in p.parts and p.name.startswith("test_")], ids=lambda p: p.name)
def test_tests_say_why(path: Path) -> None:
    """Each test function has a docstring saying why it must hold."""
    silent = [f.name for f in _functions(path) if f.name.startswith("test_") and not ast.get_docstring(f)]
    assert silent == []


def test_repository_holds_no_large_or_binary_files() -> None:
    """Models, caches and build products stay out of the repository."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    large = [n for n in names if n and (ROOT / n).is_file() and (ROOT / n).stat().st_size > 512 * 1024]
    assert large == []
