"""The README is true: its files exist, its example runs."""

import re
import subprocess
import sys
from pathlib import Path

from kvpool.testing.node_process import NodeProcess

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def test_files_named_in_the_readme_exist() -> None:
    """The request table is a map; a map of another country is worse than none."""
    named = set(re.findall(r"`((?:kvpool|router|prefill_worker|decode_worker|docs)/[\w./]+)`", TEXT)) | set(
        re.findall(r"\((docs/[\w.]+)\)", TEXT)
    )
    assert len(named) > 25
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_benches_named_in_the_readme_exist() -> None:
    """Numbers must be repeatable."""
    for name in re.findall(r"`python -m (bench\.\w+)`", TEXT):
        assert (ROOT / (name.replace(".", "/") + ".py")).is_file()


def test_sdk_example_runs_as_printed() -> None:
    """The ten lines work, word for word, against a node at the address they name."""
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    node = NodeProcess("--capacity", "64MiB")
    try:
        code = example.replace("127.0.0.1:7070", node.address) + "\nassert cached.tokens == 64 and np.array_equal(cached.blocks, blocks)\n"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    finally:
        assert node.stop() == 0
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "64"
