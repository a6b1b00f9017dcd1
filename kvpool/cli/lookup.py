"""`kvpool lookup "text"`: how much of a text the pool holds, and on which nodes."""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kvpool.cli.options import cluster_option, json_option, print_json
from kvpool.cli.state import find_cluster
from kvpool.errors import ConfigError, ProtocolError, UnavailableError

if TYPE_CHECKING:
    from kvpool.cli.prefix import PrefixReport
    from kvpool.cluster import Member

ASK_TIMEOUT_S = 5.0


@click.command()
@click.argument("text")
@click.option("--model", default=None, help="Served model name; needed only when the cluster serves several.")
@click.option("--chat", is_flag=True, help="Take the text as a user's message and look up its rendered conversation.")
@cluster_option
@json_option
def lookup(text: str, model: str | None, chat: bool, cluster: str | None, as_json: bool) -> None:
    """Show how many tokens of TEXT (- for standard input) are in the pool, and where.

    The text is taken as /v1/completions would take a prompt. Looking takes no lease and keeps nothing warm.
    """
    from kvpool.cli.snapshot import open_cluster

    text = sys.stdin.read() if text == "-" else text
    with open_cluster(find_cluster(cluster)) as membership:
        members = membership.members()
    name, root, block_tokens = choose_model(members, model)
    tokens = tokenize(members, name, text, chat=chat)
    report, errors = asyncio.run(look_up(members, root, tokens, block_tokens))
    if as_json:
        print_json(_as_json(name, report, errors))
    else:
        _show(name, report, errors)
    if errors:
        raise SystemExit(2)


def choose_model(members: "Sequence[Member]", wanted: str | None) -> tuple[str, bytes, int]:
    """(served name, namespace root, tokens per block) of the model to look in, from what the workers publish.

    Raises `ConfigError` when it isn't clear which model, `UnavailableError` when no worker serves any.
    """
    workers = [member for member in members if member.role in ("prefill", "decode") and "model" in member.info]
    names = sorted({member.info["model"] for member in workers})
    if not names:
        raise UnavailableError("no worker has joined the cluster yet, so there is no model to look for")
    if wanted is None and len(names) > 1:
        raise ConfigError(f"the cluster serves {', '.join(names)}; choose one with --model")
    name = wanted or names[0]
    if name not in names:
        raise ConfigError(f"no worker serves {name!r}; the cluster serves {', '.join(names)}")
    spaces = Counter(
        (member.info.get("namespace", ""), member.info.get("block_tokens", "")) for member in workers if member.info["model"] == name
    )
    (namespace, block_tokens), _ = min(spaces.items(), key=lambda item: (-item[1], item[0]))
    if len(spaces) > 1:
        click.echo(f"note: workers of {name} use {len(spaces)} namespaces; looking in the one most of them use", err=True)
    try:
        return name, bytes.fromhex(namespace), int(block_tokens)
    except ValueError as error:
        raise ProtocolError(f"the workers of {name} publish an unusable namespace ({error})") from error


def tokenize(members: "Sequence[Member]", model: str, text: str, *, chat: bool) -> list[int]:
    """The token ids of `text`, by the router's own tokenizer. Raises `UnavailableError` when no router answers."""
    from kvpool.cli.http import call

    routers = [member for member in members if member.role == "router"]
    if not routers:
        raise UnavailableError("no router has joined the cluster yet, and only a router can tokenise")
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if chat else {"text": text}
    refused: UnavailableError | None = None
    for router in routers:
        url = router.info.get("url", f"http://{router.address}")
        try:
            served = call(f"{url}/v1/models", timeout_s=ASK_TIMEOUT_S)
            if len(routers) > 1 and model not in {entry.get("id") for entry in served.get("data", ())}:
                continue
            tokens = call(f"{url}/tokenize", body=body, timeout_s=ASK_TIMEOUT_S).get("tokens")
        except UnavailableError as error:
            refused = error
            continue
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise ProtocolError(f"{url}/tokenize did not answer with token ids")
        return tokens
    raise refused or UnavailableError(f"no router serves {model!r}")


async def look_up(
    members: "Sequence[Member]", root: bytes, tokens: Sequence[int], block_tokens: int
) -> "tuple[PrefixReport, dict[str, str]]":
    """Ask every node for every block, one call a node: the report over those that answered, and the errors of the others."""
    from kvpool.block import chain_keys
    from kvpool.cli.credentials import security
    from kvpool.cli.prefix import report_prefix
    from kvpool.errors import KvpoolError
    from kvpool.wire.pool_client import PoolRpc

    keys = chain_keys(root, tokens, block_tokens, tail=True)
    presence: dict[str, bytes] = {}
    errors: dict[str, str] = {}

    async def ask(member: "Member") -> None:
        rpc = PoolRpc(member.address, security=security())
        try:
            presence[member.id] = await rpc.lookup(keys, ASK_TIMEOUT_S) if keys else b""
        except KvpoolError as error:
            errors[member.id] = str(error)
        finally:
            await rpc.close()

    await asyncio.gather(*(ask(member) for member in members if member.role == "node"))
    return report_prefix(dict(sorted(presence.items())), tokens=len(tokens), block_tokens=block_tokens), errors


def _as_json(model: str, report: "PrefixReport", errors: dict[str, str]) -> dict[str, Any]:
    nodes = [{"id": node, "blocks": report.blocks[node], "spans": [list(span) for span in spans]} for node, spans in report.spans.items()]
    numbers = {name: getattr(report, name) for name in ("tokens", "block_tokens", "cached_tokens", "cached_blocks")}
    return {"model": model, **numbers, "nodes": nodes, "errors": errors}


def _show(model: str, report: "PrefixReport", errors: dict[str, str]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from kvpool.cli.screen import console

    out = console()
    share = 100 * report.cached_tokens / max(1, report.tokens)
    out.print(f"{model}: {report.cached_tokens} of {report.tokens} tokens are in the pool ({share:.0f} %)", highlight=False)
    table = Table("node", "blocks", "tokens", title=f"Blocks of {report.block_tokens} tokens", title_justify="left")
    for node, spans in report.spans.items():
        table.add_row(node[:8], str(report.blocks[node]), ", ".join(f"{start}-{end}" for start, end in spans) or "-")
    for node, error in errors.items():
        table.add_row(node[:8], "[red]?[/red]", escape(" ".join(error.split())[:300]))
    out.print(table)
