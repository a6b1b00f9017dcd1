"""Tokens: made once, kept as digests, gone when revoked."""

import json
from pathlib import Path

import pytest

from kvpool.errors import AccessError, ConfigError
from kvpool.security.tokens import TokenTable, digest_of, new_token, read_rows, revoke


def make(path: Path, name: str = "alice", tenant: str | None = "acme", rights: tuple[str, ...] = ("read", "write")) -> str:
    return new_token(path, name=name, tenant=tenant, rights=rights, now_s=1)[1]


def test_token_is_known_and_only_its_digest_is_kept(tmp_path: Path) -> None:
    """A stolen table must not let anybody in."""
    path = tmp_path / "tokens.json"
    token = make(path)
    principal = TokenTable(path).principal(token)
    assert (principal.name, principal.tenant, sorted(principal.rights)) == ("alice", "acme", ["read", "write"])
    assert token not in path.read_text()
    assert digest_of(token) in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_revoked_token_is_refused_without_a_restart(tmp_path: Path) -> None:
    """The table is read again when it changes."""
    path = tmp_path / "tokens.json"
    token, other = make(path), make(path, "bob")
    table = TokenTable(path)
    assert table.principal(token).name == "alice"
    revoke(path, "alice")
    with pytest.raises(AccessError, match="revoked"):
        table.principal(token)
    assert table.principal(other).name == "bob"


def test_damaged_table_leaves_the_last_one_in_force(tmp_path: Path) -> None:
    """A slip of the pen must neither lock everybody out nor let anybody in."""
    path = tmp_path / "tokens.json"
    token = make(path)
    table = TokenTable(path)
    path.write_text("{")
    assert table.principal(token).name == "alice"
    with pytest.raises(ConfigError, match="token table"):
        TokenTable(path)


@pytest.mark.parametrize("token", ["", "kvp_", "x" * 10_000, "Bearer", "kvp_\udcff", "\0"])
def test_unknown_token_is_refused_and_not_quoted(tmp_path: Path, token: str) -> None:
    """Errors end up in logs."""
    path = tmp_path / "tokens.json"
    make(path)
    with pytest.raises(AccessError) as caught:
        TokenTable(path).principal(token)
    assert len(token) < 5 or token not in str(caught.value)


@pytest.mark.parametrize("right", ["map", "worker", "admin"])
def test_right_that_sees_through_tenants_is_not_given_to_a_tenant(tmp_path: Path, right: str) -> None:
    """A mapping opens everybody's bytes."""
    with pytest.raises(ConfigError, match="tenant"):
        make(tmp_path / "tokens.json", rights=("read", right))


@pytest.mark.parametrize("name", ["", "../x", "a\nb", "a/b", "a\0", " a", "x" * 129, "é"])
def test_names_that_do_harm_are_refused(tmp_path: Path, name: str) -> None:
    """Names stand in logs and files."""
    with pytest.raises(ConfigError):
        make(tmp_path / "tokens.json", name=name)
    with pytest.raises(ConfigError):
        make(tmp_path / "tokens.json", tenant=name)
    assert read_rows(tmp_path / "tokens.json") == []


def test_names_are_unique_and_rights_are_known(tmp_path: Path) -> None:
    """A name is what one revokes by."""
    path = tmp_path / "tokens.json"
    make(path)
    with pytest.raises(ConfigError, match="already"):
        make(path)
    with pytest.raises(ConfigError, match="rights are"):
        make(path, "b", rights=("fly",))
    with pytest.raises(ConfigError, match="without rights"):
        make(path, "b", rights=())
    with pytest.raises(ConfigError, match="no tokens"):
        revoke(path, "nobody")


@pytest.mark.parametrize("content", ["[]", "null", '{"version": 2, "tokens": []}', '{"version": 1}', '{"version":1,"tokens":[{}]}'])
def test_file_that_is_no_table_is_refused(tmp_path: Path, content: str) -> None:
    """Fails closed at the start."""
    path = tmp_path / "tokens.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"not a token table|another version"):
        TokenTable(path)


def test_short_digest_is_refused(tmp_path: Path) -> None:
    """A cut digest would match more than one token."""
    path = tmp_path / "tokens.json"
    make(path)
    table = json.loads(path.read_text())
    table["tokens"][0]["digest"] = table["tokens"][0]["digest"][:16]
    path.write_text(json.dumps(table))
    with pytest.raises(ConfigError):
        TokenTable(path)
