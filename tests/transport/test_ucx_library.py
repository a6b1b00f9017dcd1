"""Which libucp is taken, and that taking it leaves the process as it was."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from kvpool.transport.ucx import LIBRARY_VARIABLE, library, load_ucp


def run(code: str, **environment: str) -> str:
    """Output of a fresh Python; its errors fail the test."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, **environment})
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


LOAD_AND_COMPARE = """
import os, signal
from kvpool.transport.ucx import load_ucp
def handled():
    with open("/proc/self/status") as lines:
        masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigCgt", "SigIgn", "SigBlk"))]
    return [mask & 0x7FFFFFFF for mask in masks]
before = dict(os.environ), handled()
load_ucp()
after = dict(os.environ), handled()
assert after == before, (after[1], before[1], set(after[0]) ^ set(before[0]))
print("same")
"""


def test_loading_changes_neither_environment_nor_signals_nor_output() -> None:
    """UCX's own crash handlers and settings must not leak into us or our children, nor its messages into our output."""
    assert run(LOAD_AND_COMPARE) == "same\n"


def test_loading_respects_what_the_operator_set() -> None:
    """A setting made by hand is neither replaced nor removed."""
    assert run(LOAD_AND_COMPARE, UCX_LOG_LEVEL="error", UCX_HANDLE_ERRORS="none") == "same\n"


def test_library_is_loaded_once_and_says_where_from() -> None:
    """The operator sees which UCX is in use."""
    loaded = load_ucp()
    assert load_ucp() is loaded
    assert loaded.origin in ("system", "wheel")
    assert loaded.version >= (1, 18)
    assert f"{loaded.version[0]}.{loaded.version[1]}" in loaded.text
    assert library.api_version(loaded) <= (1, 21)


def test_explicit_path_is_taken_or_refused_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who names a file wants that file."""
    path = load_ucp().path
    assert load_ucp(path).origin == "path"
    wrong = tmp_path / "libucp.so.0"
    wrong.write_text("not a library")
    with pytest.raises(ConfigError, match="name a libucp"):
        load_ucp(str(wrong))
    monkeypatch.setenv(LIBRARY_VARIABLE, str(tmp_path / "missing.so"))
    with pytest.raises(ConfigError, match="missing"):
        load_ucp()


def test_old_system_library_passed_over_with_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Debian 12 ships 1.13, which dies of its peers: the wheel is the better choice, and the log says so."""
    monkeypatch.setattr(library, "_loaded", {})
    monkeypatch.setattr(library, "_version_elsewhere", lambda path: (1, 13, 1))
    assert load_ucp().origin == "wheel"
    assert "1.13.1" in caplog.text


def test_no_library_at_all_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing extra is the operator's to fix, so the message names it."""
    monkeypatch.setattr(library, "_loaded", {})
    monkeypatch.setattr(library, "_candidates", lambda: iter([("system", "libnothing.so.0")]))
    with pytest.raises(ConfigError, match=r"pip install 'kvpool\[ucx\]'"):
        load_ucp()


def test_version_of_a_library_is_asked_elsewhere() -> None:
    """The answer comes without loading it here; what can't be loaded is an OSError."""
    loaded = load_ucp()
    assert library._version_elsewhere(loaded.path) == loaded.version
    with pytest.raises(OSError, match="cannot open"):
        library._version_elsewhere("libnothing.so.0")
