"""Stock engines for the tests of this folder: interpreters that have them, servers of theirs, pool nodes. All are stopped behind the test.

`make engines` installs them, `make test-engines` names them (`KVPOOL_VLLM_PYTHON` and so on); without them these tests are skipped.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvpool.config.models import resolve_model
from kvpool.testing.node_process import NodeProcess
from kvpool.testing.stock_process import VllmServer
from kvpool.units import SECOND

ROOT = Path(__file__).parents[2]


def interpreter(engine: str) -> str:
    """The interpreter that has an engine (VLLM, LMCACHE, SGLANG); skips the test where there is none."""
    name = f"KVPOOL_{engine}_PYTHON"
    found = shutil.which(os.environ.get(name) or "")
    if not found:
        pytest.skip(f"{name} names no interpreter: run `make engines`, then `make test-engines`")
    return found


@pytest.fixture
def vllm_python() -> str:
    """An interpreter with vLLM for CPUs."""
    return interpreter("VLLM")


@pytest.fixture
def lmcache_python() -> str:
    """An interpreter with LMCache."""
    return interpreter("LMCACHE")


@pytest.fixture
def sglang_python() -> str:
    """An interpreter with SGLang's storage contract."""
    return interpreter("SGLANG")


@pytest.fixture(scope="session")
def small_model() -> Path:
    """The directory of SmolLM2."""
    return resolve_model("smollm2", deadline_ns=time.monotonic_ns() + 600 * SECOND)


@pytest.fixture
def pool_node() -> Iterator[Callable[..., NodeProcess]]:
    """Start a pool node with flags of `python -m kvpool.node`."""
    with ExitStack() as stack:

        def start(*flags: str) -> NodeProcess:
            node = NodeProcess(*flags)
            stack.callback(node.stop)
            return node

        yield start


@pytest.fixture
def vllm_server(vllm_python: str, small_model: Path, tmp_path: Path) -> Iterator[Callable[..., VllmServer]]:
    """Start a vLLM server with the small model and this source tree, healthy when it is returned; takes what `VllmServer` does."""
    with ExitStack() as stack:
        count = 0

        def start(**options: Any) -> VllmServer:
            nonlocal count
            env = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]), **options.pop("env", {})}
            server = VllmServer(vllm_python, options.pop("model", small_model), tmp_path / f"vllm{count}.log", env=env, **options)
            count += 1
            stack.callback(server.stop)
            return server.start()

        yield start


@pytest.fixture
def run_by() -> Callable[..., str]:
    """Run a program text by another interpreter with this source tree on its path; its standard output."""

    def run(python: str, text: str, *arguments: str, timeout_s: float = 120) -> str:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([python, "-c", text, *arguments], env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, f"{python}:\n{done.stderr[-4000:]}"
        return done.stdout

    return run
