"""The checked-in generated code is what the protos say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "kvpool" / "wire" / "gen"


def test_generated_code_matches_the_protos(tmp_path: Path) -> None:
    """Editing a proto without `make proto`, or generated code by hand, must not pass."""
    protos = [f"kvpool/wire/gen/{p.name}" for p in sorted((ROOT / "proto/kvpool/v1").glob("*.proto"))]
    assert protos
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-Ikvpool/wire/gen={ROOT}/proto/kvpool/v1", *outputs, *protos]
    subprocess.run(command, check=True, timeout=60, cwd=ROOT)
    fresh = {p.name: p.read_text() for p in (tmp_path / "kvpool/wire/gen").iterdir()}
    checked_in = {p.name: p.read_text() for p in GENERATED.iterdir() if p.is_file() and p.name != "__init__.py"}
    assert fresh == checked_in
