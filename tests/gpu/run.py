"""The gpu suite on a machine with a CUDA device: `python tests/gpu/run.py [--limit 240]`.

Runs every test marked `gpu`, wherever it lies, for at most `--limit` seconds, and prints one JSON object as the last line. Exit status 0
when all have passed and none was skipped. Without a device it says so and runs nothing: most of these tests run on twins in the ordinary
suite.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def outcomes(report: Path) -> Counter[str]:
    """How many tests of a JUnit file ended how."""
    cases = ElementTree.parse(report).iter("testcase") if report.exists() and report.stat().st_size else ()
    return Counter(next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed") for case in cases)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run all tests that are marked gpu.")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for all of them")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"suite": "gpu", "ok": False, "device": None, "torch": torch.__version__}))
        return 1
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", f"--junitxml={report}", "tests"]
        try:
            status = subprocess.run(command, cwd=ROOT, timeout=args.limit, check=False).returncode
        except subprocess.TimeoutExpired:
            status = 124
        found = outcomes(report)
    ok = status == 0 and not found["skipped"]
    print(json.dumps({
        "suite": "gpu", "ok": ok, "device": torch.cuda.get_device_name(), "torch": torch.__version__, "status": status, **found,
    }))  # fmt: skip
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
