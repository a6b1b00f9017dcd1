"""Where `kvpool up` keeps its logs, one directory per run, and how many runs are kept.

Not beside the state file: `XDG_RUNTIME_DIR` is memory, and gone after a logout.
"""

import os
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

KEPT_RUNS = 10

_RUN = re.compile(r"^\d{8}T\d{6}Z-(\d+)$")


def log_root() -> Path:
    """`${XDG_STATE_HOME:-~/.local/state}/kvpool/logs`."""
    state_home = os.environ.get("XDG_STATE_HOME")
    return (Path(state_home) if state_home else Path.home() / ".local" / "state") / "kvpool" / "logs"


def new_run(root: Path, now: datetime | None = None) -> Path:
    """The directory for this process's run (not made yet), after all but the latest `KEPT_RUNS - 1` before it were removed."""
    runs = sorted(path for path in root.glob("*") if _RUN.match(path.name) and path.is_dir()) if root.is_dir() else []
    for path in runs[: max(0, len(runs) - KEPT_RUNS + 1)]:
        shutil.rmtree(path, ignore_errors=True)
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    return root / f"{stamp}-{os.getpid()}"
