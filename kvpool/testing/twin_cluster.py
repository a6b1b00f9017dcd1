"""A small cluster for tests of operators' tools: twins of nodes behind real gRPC servers, members in memory, a stand-in for the router.

Node A holds the first two blocks of the text "a prompt", node B the last two, so that the second has two copies and the last,
a partial one, has one.
"""

import asyncio
import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import click
import grpc.aio
from click.testing import CliRunner, Result

from kvpool.block import chain_keys
from kvpool.cluster import Membership, open_membership
from kvpool.testing.admin_twin import MemoryAdmin
from kvpool.testing.membership_kit import until
from kvpool.wire.admin_server import add_admin
from kvpool.wire.channel import bind
from kvpool.wire.fence import NodeIdentity

ROOT = bytes(range(32))
TEXT = "a prompt"
TOKENS = list(range(100, 140))
KEYS = chain_keys(ROOT, TOKENS, 16, tail=True)
"""Of `TEXT`: two blocks of 16 tokens and one of 8."""
A, B, DEAD = "a" * 32, "b" * 32, "c" * 32
STRANGER = "ee" * 32
"""A key that nobody holds."""
NOBODY = "127.0.0.1:9"
"""An address where nothing answers."""


class RouterPages(BaseHTTPRequestHandler):
    """/v1/models and /tokenize."""

    def do_GET(self) -> None:
        """The served models."""
        self._answer({"data": [{"id": "toy"}]})

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


class TwinCluster:
    """The cluster; `a` and `b` are its nodes' twins. `run` and `json` run `program`, a group of commands, in it."""

    def __init__(self, program: click.Command) -> None:
        self._program = program
        self.url = f"memory://admin-{uuid.uuid4().hex[:8]}"
        self.membership: Membership = open_membership(self.url)
        self.a, self.b = MemoryAdmin(NodeIdentity(A, 7)), MemoryAdmin(NodeIdentity(B, 8))
        self.a.put(KEYS[:2], tenant="team")
        self.b.put(KEYS[1:2], parent=KEYS[0], depth=16)
        self.b.put(KEYS[2:], parent=KEYS[1], depth=32, n_tokens=8)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._servers: list[grpc.aio.Server] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), RouterPages)
        self._http_thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._http_thread.start()
        for twin in (self.a, self.b):
            self.node(twin.identity, self._serve(twin))
        info = {"model": "toy", "namespace": ROOT.hex(), "block_tokens": "16"}
        self.membership.join(role="prefill", address=NOBODY, info=info)
        address = f"127.0.0.1:{self._http.server_address[1]}"
        self.membership.join(role="router", address=address, info={"url": f"http://{address}"})
        until(self.membership, lambda view: len(view) == 4)

    def node(self, identity: NodeIdentity, address: str = NOBODY) -> None:
        """Another node joins; without an address, one that doesn't answer."""
        info = {"incarnation": str(identity.incarnation)}
        self.membership.join(role="node", id=identity.node_id, address=address, info=info)
        until(self.membership, lambda view: identity.node_id in {member.id for member in view})

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

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()
        self._http.shutdown()
        self._http.server_close()
        self._http_thread.join(30)
        self.membership.close()

    def _serve(self, twin: MemoryAdmin) -> str:
        async def start() -> str:
            server = grpc.aio.server()
            add_admin(server, twin)
            address = bind(server, "127.0.0.1:0")
            await server.start()
            self._servers.append(server)
            return address

        return asyncio.run_coroutine_threadsafe(start(), self._loop).result(30)
