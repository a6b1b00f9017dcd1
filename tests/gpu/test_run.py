"""What the gpu suite reports."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("run.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so_and_fails() -> None:
    """A suite that ran nothing must not look like one that passed."""
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 1
    assert json.loads(run.stdout.splitlines()[-1])["device"] is None


def test_outcomes_are_counted(tmp_path: Path) -> None:
    """From what pytest writes; nothing is counted of a suite that was cut off."""
    spec = importlib.util.spec_from_file_location("gpu_run", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    report = tmp_path / "report.xml"
    assert not script.outcomes(report)
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\ndef test_a():\n    assert True\n\ndef test_b():\n    pytest.skip('no')\n\ndef test_c():\n    assert False\n"
    )
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(tmp_path / "test_it.py")],
        capture_output=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert script.outcomes(report) == {"passed": 1, "skipped": 1, "failure": 1}
