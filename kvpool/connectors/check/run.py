"""Runs the probe by another interpreter, within a time limit."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpool.connectors.check.lines import Facts

_PROBE = Path(__file__).with_name("probe.py")
MARK = "kvpool-probe "


def probe(python: str, asked: Mapping[str, Any], timeout_s: float) -> Facts:
    """What the probe finds; where it says nothing, the step `python` says why."""
    try:
        done = subprocess.run(
            [python, "-c", _PROBE.read_text()], input=json.dumps(asked), capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except OSError as error:
        return {"python": {"error": f"{python} can't be run: {error.strerror}"}}
    except subprocess.TimeoutExpired:
        return {"python": {"error": f"{python} was not done within {timeout_s:.0f} s; allow more with --timeout"}}
    answers = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not answers:
        words = " ".join(done.stderr.split()[-60:])
        return {"python": {"error": f"{python} ended with status {done.returncode} and said nothing that can be read: {words}"}}
    found: Facts = json.loads(answers[-1].removeprefix(MARK))
    return found
