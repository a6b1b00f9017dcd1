"""Servers of stock engines as child processes, for tests and benches: vLLM's and LMCache's.

They are started by the interpreter of an environment of their own, wait for their health by a deadline, tell the end of their log when
they fail, and leave neither processes nor shared memory behind, however they end.
"""

import contextlib
import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from kvpool.cluster.child import Child

HEALTH_S = 420.0
"""How long a server may take to become healthy: vLLM imports and warms up for 26 s on a quiet machine, minutes on a busy one."""
STOP_S = 30.0
_REST_S = 5.0
_LOG_TAIL = 4000
_LEFT_BEHIND = ("vllm", "psm_", "sem.", "lmcache", "torch_")
"""How names begin of what engines make in /dev/shm and forget when they are ended."""


class StockProcess:
    """One server: `url` is where it serves HTTP, `health` answers 200 once it is ready. A context manager: starts, then stops."""

    def __init__(self, argv: Sequence[str], *, url: str, log: Path, env: Mapping[str, str], health: str = "/health") -> None:
        self.url, self.log = url, log
        self._health = health
        self._argv = list(argv)
        self._env = {**os.environ, **env}
        self._child: Child | None = None

    def begin(self) -> None:
        """Start the process, without waiting for it."""
        self._child = Child(self._argv, log_path=self.log, env=self._env)

    def wait_healthy(self, timeout_s: float = HEALTH_S) -> None:
        """Until it serves. Raises `AssertionError` with the end of its log when it ended, or doesn't serve in time."""
        deadline = time.monotonic() + timeout_s
        while not self._healthy():
            ended = self._child is None or self._child.exit_code is not None
            if ended or time.monotonic() > deadline:
                self.stop()
                raise AssertionError(f"{self._argv[0]} {'ended' if ended else f'is not healthy after {timeout_s:.0f} s'}:\n{self.tail()}")
            time.sleep(0.25)

    def start(self, timeout_s: float = HEALTH_S) -> Self:
        """`begin` and `wait_healthy`."""
        self.begin()
        self.wait_healthy(timeout_s)
        return self

    def stop(self) -> None:
        """End it and what it started; a second call does nothing."""
        child, self._child = self._child, None
        if child is None:
            return
        shared = _shared_memory(child.pid)
        child.stop(STOP_S)
        _end_group(child.pid)
        for name in shared:
            (Path("/dev/shm") / name).unlink(missing_ok=True)

    def kill(self) -> None:
        """As if the machine had ended it."""
        if self._child is not None:
            self._child.send_signal(signal.SIGKILL)
            self.stop()

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-_LOG_TAIL:] if self.log.exists() else ""

    def ask(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 120.0) -> str:
        """GET, or POST of JSON; the answer's text. Raises `AssertionError` with the server's words for an error status."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers={"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read().decode(errors='replace')[:500]}") from None

    def _healthy(self) -> bool:
        try:
            self.ask(self._health, timeout_s=5)
        except (OSError, AssertionError):
            return False
        return True

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()


class VllmServer(StockProcess):
    """vLLM for CPUs with 1 GiB of KV memory and one thread; `core` is the core that thread has for itself.

    `transfer` is its `--kv-transfer-config`; `flags` come behind all others.
    """

    def __init__(
        self,
        python: str,
        model: Path,
        log: Path,
        *,
        transfer: Mapping[str, Any] | None = None,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        core: int = 0,
        max_model_len: int = 2048,
    ) -> None:
        (port,) = free_ports(1)
        argv = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--served-model-name", "served"]
        argv += [
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--max-model-len",
            str(max_model_len),
            "--max-num-seqs",
            "8",
            "--enforce-eager",
        ]
        argv += ["--enable-prompt-tokens-details"]
        if transfer is not None:
            argv += ["--kv-transfer-config", json.dumps(transfer)]
        settings = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(core % (os.cpu_count() or 1)),
            "VLLM_SERVER_DEV_MODE": "1",
            **(env or {}),
        }
        super().__init__([*argv, *flags], url=f"http://127.0.0.1:{port}", log=log, env=settings)

    def complete(self, prompt: Sequence[int] | str, max_tokens: int, **parameters: Any) -> dict[str, Any]:
        """One greedy answer: `tokens`, `text`, `cached` (tokens of the prompt that it had) and `seconds`."""
        body = {
            "model": "served",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        began = time.monotonic()
        answer = json.loads(self.ask("/v1/completions", {**body, **parameters}))
        (choice,), usage = answer["choices"], answer["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return {"tokens": choice["token_ids"], "text": choice["text"], "cached": cached, "seconds": time.monotonic() - began}

    def counters(self) -> dict[str, float]:
        """Its Prometheus counters and gauges, summed over labels, without the ending `_total`; labelled ones by `source` too."""
        found: dict[str, float] = {}
        for line in self.ask("/metrics").splitlines():
            if line.startswith("#") or " " not in line:
                continue
            spelled, value = line.rsplit(" ", 1)
            name, _, labels = spelled.partition("{")
            for key in {name, *([f"{name}:{labels.split('source=')[1].split(chr(34))[1]}"] if 'source="' in labels else [])}:
                found[key.replace("_total", "")] = found.get(key.replace("_total", ""), 0.0) + float(value)
        return found

    def forget(self) -> None:
        """Clear its own prefix cache; what connectors hold elsewhere stays."""
        self.ask("/reset_prefix_cache", {})


class LmcacheServer(StockProcess):
    """LMCache's server in its mode of a process of its own, with memory only; `transfer` is what a vLLM that is to use it is given."""

    def __init__(self, python: str, log: Path, *, gib: int = 1, flags: Sequence[str] = ()) -> None:
        port, http = free_ports(2)
        argv = [python, "-m", "lmcache.cli.main", "server", "--port", str(port), "--http-port", str(http)]
        argv += ["--l1-size-gb", str(gib), "--chunk-size", "256", "--eviction-policy", "LRU", "--disable-observability"]
        argv += ["--supported-transfer-mode", "engine_driven", *flags]
        env = {"LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}
        super().__init__(argv, url=f"http://127.0.0.1:{http}", log=log, env=env, health="/healthcheck")
        self.transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
        }


def free_ports(count: int) -> list[int]:
    """Ports of this host that are free now."""
    bound = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in bound]
    for one in bound:
        one.close()
    return ports


def _end_group(leader: int) -> None:
    """End what outlived the leader of a group. It has a while to clean up: Python's resource tracker unlinks what others forgot."""
    deadline = time.monotonic() + _REST_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(leader, 0)
            time.sleep(0.05)
        os.killpg(leader, signal.SIGKILL)


def _shared_memory(leader: int) -> set[str]:
    """What the processes of a group have in /dev/shm and are known to forget."""
    names = set()
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(directory.name)) != leader:
                continue
            lines = (directory / "maps").read_text().splitlines()
        except (OSError, ValueError):
            continue  # it ended meanwhile
        names |= {line.rpartition("/dev/shm/")[2] for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")}
    return {name for name in names if name.startswith(_LEFT_BEHIND)}
