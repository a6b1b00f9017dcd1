"""`--model` names a directory: converted once, never downloaded, never written to by us."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvpool.config import models
from kvpool.errors import ConfigError, DeadlineError
from kvpool.units import SECOND


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVPOOL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "some.gguf"
    path.write_bytes(b"GGUF not really")
    return path


def _soon(seconds: float = 30) -> int:
    return time.monotonic_ns() + int(seconds * SECOND)


def _pretend(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the converter's process by one that takes a moment and writes one file."""
    runs: list[Path] = []

    def convert(source: Path, out: Path, deadline_ns: int) -> None:
        runs.append(out)
        out.mkdir()
        (out / "config.json").write_text("{}")
        threading.Event().wait(0.1)

    monkeypatch.setattr(models, "_convert", convert)
    return runs


def test_cache_root_without_settings_is_under_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The documented order of places: KVPOOL_CACHE, XDG_CACHE_HOME, ~/.cache."""
    assert models.cache_root() == tmp_path / "cache"
    monkeypatch.delenv("KVPOOL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert models.cache_root() == Path("/x/kvpool")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models.cache_root() == Path.home() / ".cache" / "kvpool"


def test_resolve_model_of_a_directory_is_that_directory(tmp_path: Path, cache: Path) -> None:
    """A user's directory is used in place, and nothing is cached for it."""
    (tmp_path / "config.json").write_text("{}")
    assert models.resolve_model(str(tmp_path), deadline_ns=_soon()) == tmp_path.resolve()
    assert not cache.exists()


def test_resolve_model_of_nonsense_says_what_to_give(tmp_path: Path) -> None:
    """Each wrong name gets an error that names the three right ones."""
    for name in ("meta-llama/Llama-3.1-8B", str(tmp_path), str(tmp_path / "absent.gguf")):
        with pytest.raises(ConfigError, match=r"smollm2, a \.gguf file or a local"):
            models.resolve_model(name, deadline_ns=_soon())


def test_resolve_model_of_a_gguf_converts_once_and_finds_it_again(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversion costs half a minute, so the second start must not repeat it; a changed file must."""
    runs = _pretend(monkeypatch)
    first = models.resolve_model(str(gguf), deadline_ns=_soon())
    assert models.resolve_model(str(gguf), deadline_ns=_soon()) == first
    assert len(runs) == 1
    assert sorted(p.name for p in first.parent.iterdir()) == [first.name, f"{first.name}.lock"]
    gguf.write_bytes(b"GGUF another")
    assert models.resolve_model(str(gguf), deadline_ns=_soon()) != first


def test_resolve_model_by_many_at_once_converts_once(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster's processes start together: one converts under the lock, the rest wait for it."""
    runs = _pretend(monkeypatch)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(models.resolve_model(str(gguf), deadline_ns=_soon()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == len(runs) == 1


def test_resolve_model_of_a_held_lock_ends_at_the_deadline(gguf: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Every wait has a deadline, the wait for another process's conversion too."""
    _pretend(monkeypatch)
    models.resolve_model(str(gguf), deadline_ns=_soon())
    lock = next((cache / "models").glob("*.lock"))
    directory = lock.with_suffix("")
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", f"import fcntl; f=open({str(lock)!r},'a'); fcntl.flock(f,fcntl.LOCK_EX); print('held',flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(DeadlineError, match="another process"):
            models.resolve_model(str(gguf), deadline_ns=_soon(0.2))
        holder.kill()


def test_resolve_model_of_a_broken_gguf_reports_the_converter_and_leaves_nothing(gguf: Path, cache: Path) -> None:
    """The real converter refuses nonsense; its complaint reaches the user and no half directory stays."""
    with pytest.raises(ConfigError, match=r"could not convert .*some\.gguf"):
        models.resolve_model(str(gguf), deadline_ns=_soon(120))
    assert [p.suffix for p in (cache / "models").iterdir()] == [".lock"]


def test_weights_digest_depends_on_weights_only(tmp_path: Path, cache: Path) -> None:
    """Equal weights in two directories are one identity; a changed byte is another; the user's directory stays untouched."""
    one, two = tmp_path / "one", tmp_path / "two"
    for directory in (one, two):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"weights" * 100)
    assert models.weights_digest(one) == models.weights_digest(two) == models.weights_digest(one)
    assert [p.name for p in one.iterdir()] == ["model.safetensors"]
    assert len(list((cache / "digests").iterdir())) == 2
    (two / "model.safetensors").write_bytes(b"Weights" * 100)
    assert models.weights_digest(one) != models.weights_digest(two)


def test_weights_digest_with_a_damaged_note_reads_the_file_again(tmp_path: Path, cache: Path) -> None:
    """What is remembered is only a shortcut."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    digest = models.weights_digest(tmp_path)
    next((cache / "digests").iterdir()).write_text("[1")
    assert models.weights_digest(tmp_path) == digest


def test_weights_digest_without_safetensors_says_so(tmp_path: Path) -> None:
    """Other weight formats are refused clearly, not hashed as nothing."""
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        models.weights_digest(tmp_path)
