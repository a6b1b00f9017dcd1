"""Where the running local cluster is written down, so that other commands find it without flags.

One small JSON file of this user, `${XDG_RUNTIME_DIR:-/tmp}/kvpool-<uid>/cluster.json`, mode 0600 in a directory of mode 0700. It is
a hint: a file whose supervisor no longer lives is ignored. In a shared /tmp somebody else might have made the directory first; one
that isn't ours alone is refused.
"""

import json
import os
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError

MAX_STATE_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """A running local cluster: its URLs, the supervisor's pid, and where its logs are."""

    cluster_url: str
    router_url: str
    pid: int
    log_dir: str


def runtime_dir() -> Path:
    """The directory for this user's run-time files, made on first use. Raises `ConfigError` when somebody else can write there."""
    directory = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"kvpool-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise ConfigError(f"can't use {directory}: {error.strerror}; set XDG_RUNTIME_DIR to a directory of yours") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{directory} is not a directory of yours alone (mode 0700); remove it or set XDG_RUNTIME_DIR")
    return directory


def state_path() -> Path:
    """The state file of this user."""
    return runtime_dir() / "cluster.json"


def write_state(path: Path, state: ClusterState) -> None:
    """Replace the file at `path` as a whole; readers see the old or the new one."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # mkstemp makes it 0600
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(state), file, indent=2)
    os.replace(name, path)


def read_state(path: Path) -> ClusterState | None:
    """The cluster written down at `path`, if its supervisor still lives; None otherwise."""
    try:
        with path.open() as file:
            fields: Any = json.loads(file.read(MAX_STATE_BYTES))
        state = ClusterState(
            cluster_url=str(fields["cluster_url"]),
            router_url=str(fields["router_url"]),
            pid=int(fields["pid"]),
            log_dir=str(fields["log_dir"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}); remove it, or say which cluster with --cluster URL") from error
    return state if _lives(state.pid) else None


def clear_state(path: Path, pid: int) -> None:
    """Remove the file at `path` if it is the one of the supervisor `pid`."""
    try:
        if json.loads(path.read_text())["pid"] == pid:
            path.unlink()
    except (OSError, ValueError, KeyError, TypeError):
        return  # gone, or not ours


def find_cluster(url: str | None) -> str:
    """The URL given, or that of the running local cluster. Raises `ConfigError` when there is neither."""
    if url is not None:
        return url
    state = read_state(state_path())
    if state is None:
        raise ConfigError("no local cluster is running; start one with `kvpool up`, or name another with --cluster redis://host:port/0")
    return state.cluster_url


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
