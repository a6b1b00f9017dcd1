"""What a cluster for tests of commands is made of: gRPC servers on a loop of their own, members in memory, a stand-in for the router."""

import asyncio
import json
import threading
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import click
import grpc.aio
from click.testing import CliRunner, Result

from kvpool.block import chain_keys
from kvpool.cluster import Membership, open_membership
from kvpool.wire.channel import bind

ROOT = bytes(range(32))
TEXT = "a prompt"
TOKENS = list(range(100, 140))
BLOCK_TOKENS = 16
KEYS = chain_keys(ROOT, TOKENS, BLOCK_TOKENS, tail=True)
"""Of `TEXT`: two blocks of 16 tokens and one of 8."""
NOBODY = "127.0.0.1:9"
"""An address where nothing answers."""
_LIMIT_S = 30.0


class RouterPages(BaseHTTPRequestHandler):
    """/health, /v1/models and /tokenize."""

    def do_GET(self) -> None:
        """The served models, or that all is well."""
        self._answer({"data": [{"id": "toy"}]} if self.path == "/v1/models" else {"status": "ok"})

    def do_POST(self) -> None:
        """The tokens of a text or a conversation."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = asked["text"] if "text" in asked else "chat:" + asked["messages"][0]["content"]
        self._answer({"tokens": TOKENS if text == TEXT else [ord(letter) for letter in text]})

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def _answer(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class CliCluster:
    """An empty cluster: `serve` and `membership.join` fill it, `run` and `json` run `program`, a group of commands, in it."""

    def __init__(self, program: click.Command) -> None:
        self._program = program
        self.url = f"memory://cli-{uuid.uuid4().hex[:8]}"
        self.membership: Membership = open_membership(self.url)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._servers: list[grpc.aio.Server] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), RouterPages)
        self._http_thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._http_thread.start()

    def serve(self, register: Callable[[grpc.aio.Server], None]) -> str:
        """The address of a new server with what `register` adds to it."""

        async def start() -> str:
            server = grpc.aio.server()
            register(server)
            address = bind(server, "127.0.0.1:0")
            await server.start()
            self._servers.append(server)
            return address

        return asyncio.run_coroutine_threadsafe(start(), self._loop).result(_LIMIT_S)

    def worker(self, *, model: str = "toy", root: bytes = ROOT, address: str = NOBODY) -> None:
        """A prefill worker joins."""
        info = {"model": model, "namespace": root.hex(), "block_tokens": str(BLOCK_TOKENS), "max_tokens": "512"}
        self.membership.join(role="prefill", address=address, info=info)

    def router(self) -> None:
        """The stand-in for the router joins."""
        address = f"127.0.0.1:{self._http.server_address[1]}"
        self.membership.join(role="router", address=address, info={"url": f"http://{address}"})

    def run(self, *arguments: str, stdin: str | None = None) -> Result:
        """Run the program with `arguments` and this cluster's URL."""
        return CliRunner().invoke(self._program, [*arguments, "--cluster", self.url], input=stdin, env={"COLUMNS": "200"})

    def json(self, *arguments: str, exit_code: int = 0, stdin: str | None = None) -> Any:
        """What it prints with --json, after checking its exit code."""
        result = self.run(*arguments, "--json", stdin=stdin)
        assert result.exit_code == exit_code, result.output
        return json.loads(result.stdout)

    def close(self) -> None:
        """Stop everything."""

        async def stop() -> None:
            await asyncio.gather(*(server.stop(None) for server in self._servers))

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(_LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LIMIT_S)
        self._loop.close()
        self._http.shutdown()
        self._http.server_close()
        self._http_thread.join(_LIMIT_S)
        self.membership.close()
