"""`kvpool token` and `kvpool rate`: tables made, shown and changed by an operator."""

import json
from pathlib import Path

from click.testing import CliRunner, Result

from kvpool.cli.main import cli
from kvpool.security.tenants import TenantBook
from kvpool.security.tokens import TokenTable


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


def test_token_is_printed_once_and_works(tmp_path: Path) -> None:
    """What is printed is what a server accepts; the list doesn't show it."""
    table = str(tmp_path / "tokens.json")
    made = run("token", "new", "--tokens", table, "--name", "alice", "--tenant", "acme")
    assert made.exit_code == 0, made.output
    token = made.output.strip()
    assert TokenTable(Path(table)).principal(token).tenant == "acme"
    listed = run("token", "list", "--tokens", table)
    assert "alice" in listed.output
    assert token not in listed.output
    (row,) = json.loads(run("token", "list", "--tokens", table, "--json").output)
    assert (row["name"], row["tenant"], row["rights"]) == ("alice", "acme", ["read", "write"])
    assert run("token", "revoke", row["id"], "--tokens", table).output.startswith("revoked")
    assert json.loads(run("token", "list", "--tokens", table, "--json").output) == []


def test_wrong_use_is_told(tmp_path: Path) -> None:
    """One line and exit code 1."""
    table = str(tmp_path / "tokens.json")
    for arguments, words in (
        (("--name", "a", "--rights", "fly"), "rights are read"),
        (("--name", "a b"), "letters, digits"),
        (("--name", "a", "--tenant", "t", "--rights", "admin"), "without --tenant"),
    ):
        result = run("token", "new", "--tokens", table, *arguments)
        assert result.exit_code == 1
        assert words in result.output
    assert "no tokens" in run("token", "revoke", "x", "--tokens", table).output


def test_rate_of_a_router_goes_into_its_file(tmp_path: Path) -> None:
    """Which the router reads again."""
    book = tmp_path / "tenants.json"
    assert run("rate", "acme", "--requests-per-s", "5", "--bytes-per-s", "1MiB", "--file", str(book)).exit_code == 0
    limits = TenantBook(book).limits("acme")
    assert (limits.requests_per_s, limits.bytes_per_s) == (5.0, float(1 << 20))


def test_credentials_that_make_no_sense_are_told_by_every_command(tmp_path: Path) -> None:
    """They are flags of `kvpool` itself."""
    pem = tmp_path / "a.pem"
    pem.write_text("")
    result = run("--tls-cert", str(pem), "nodes", "--cluster", "memory://test-credentials")
    assert result.exit_code == 1
    assert "belong together" in result.output
