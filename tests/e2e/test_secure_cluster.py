"""A whole cluster with everything switched on by the environment: HTTPS, TLS inside, tokens, salts; and no secret in any log."""

import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from bench.isolation import make_model, site
from kvpool.cli.chat import ChatClient
from kvpool.cli.main import cli
from kvpool.cli.procs import ClusterOptions
from kvpool.cli.supervisor import LocalCluster
from kvpool.security.salt import tenant_salt
from kvpool.units import MIB

PROMPT = [3 + i % 200 for i in range(200)]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalCluster, dict[str, str], Path]]:
    """The cluster, its users' API keys, and the directory of its files and logs."""
    directory = tmp_path_factory.mktemp("secured")
    model = directory / "model"
    model.mkdir()
    make_model(model)
    with site(directory) as users:
        options = ClusterOptions(port=0, model=str(model), capacity_bytes=64 * MIB, resident_bytes=64 * MIB)
        with LocalCluster(options, log_dir=directory / "logs") as cluster:
            cluster.wait_ready()
            yield cluster, users, directory


def ask(cluster: LocalCluster, key: str | None, path: str = "/v1/completions", **changes: Any) -> httpx.Response:
    """One request over HTTPS."""
    context = ssl.create_default_context(cafile=os.environ["KVPOOL_TLS_CA"])
    body = {"model": "model", "prompt": PROMPT, "max_tokens": 2, "temperature": 0, **changes}
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=cluster.url, verify=context, timeout=60, headers=headers) as http:
        return http.get(path) if path == "/metrics" else http.post(path, json=body)


def cached(answer: httpx.Response) -> int:
    """Prompt tokens that were not computed."""
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_tenants_share_a_cluster_and_no_token(secured: tuple[LocalCluster, dict[str, str], Path]) -> None:
    """The same prompt: a colleague finds it, an outsider doesn't, wherever it lies; answers are the same."""
    cluster, users, _ = secured
    first = ask(cluster, users["victim"])
    assert cached(first) == 0
    outsider, colleague = ask(cluster, users["attacker"]), ask(cluster, users["colleague"])
    assert cached(outsider) == 0
    assert cached(colleague) > 150
    assert cached(ask(cluster, users["colleague"], cache_salt="apart")) == 0
    assert cached(ask(cluster, users["attacker"])) > 150
    texts = {answer.json()["choices"][0]["text"] for answer in (first, outsider, colleague)}
    assert len(texts) == 1


def test_strangers_and_users_are_kept_to_what_they_may(secured: tuple[LocalCluster, dict[str, str], Path]) -> None:
    """The front door and the operator's door."""
    cluster, users, directory = secured
    assert ask(cluster, None).status_code == 401
    assert ask(cluster, users["victim"], "/metrics").status_code == 403
    told = CliRunner().invoke(cli, ["nodes", "--cluster", cluster.cluster_url, "--json"])
    assert told.exit_code == 0, told.output
    (node,) = json.loads(told.output)
    assert node["used_bytes"] > 0
    (directory / "user.token").write_text(users["victim"])
    as_user = ("--token-file", str(directory / "user.token"))
    refused = CliRunner().invoke(cli, [*as_user, "quota", "acme", "--remove", "--cluster", cluster.cluster_url])
    assert refused.exit_code == 2
    assert "needs the right admin" in refused.output.replace("\n", " ")


def test_commands_talk_to_a_secured_router(secured: tuple[LocalCluster, dict[str, str], Path]) -> None:
    """With the credentials of the environment, as `kvpool demo` does."""
    cluster, _, _ = secured
    client = ChatClient(cluster.url)
    messages = [{"role": "user", "content": "hello"}]
    assert client.model() == "model"
    assert len(client.prompt_tokens(messages)) > 1
    assert len(client.chat(messages, model="model", max_tokens=3).tokens) >= 1


def test_no_secret_in_any_log(secured: tuple[LocalCluster, dict[str, str], Path]) -> None:
    """Of any process, after all that."""
    cluster, users, directory = secured
    secret = (directory / "secret").read_bytes()
    logs = "".join(path.read_text(errors="replace") for path in sorted((directory / "logs").iterdir()) if path.is_file())
    assert "serving on https://" in logs
    hidden = [*users.values(), (directory / "own").read_text(), secret.decode(), tenant_salt(secret, "acme").hex()]
    assert [name for name in hidden if name in logs] == []
    assert cluster.ready()
