"""`kvpool explain REQUEST_ID`: every candidate of every choice, its terms, who was chosen, and what happened."""

import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import click

from kvpool.cli.options import cluster_option, json_option, print_json
from kvpool.cli.routers import router_urls
from kvpool.errors import ConfigError, UnavailableError

ASK_TIMEOUT_S = 5.0
_MOST_TERMS = 8


@click.command()
@click.argument("request_id")
@click.option("--router", metavar="URL", default=None, help="The router that served it; by default all routers of the cluster are asked.")
@cluster_option
@json_option
def explain(request_id: str, router: str | None, cluster: str | None, as_json: bool) -> None:
    """Show why request REQUEST_ID (its x-request-id, or the id of its answer) went where it went.

    A router remembers its last 1,024 requests.
    """
    found = _ask([router.rstrip("/")] if router else router_urls(cluster), request_id)
    if as_json:
        print_json(found)
    else:
        _show(found)


def _ask(urls: Sequence[str], request_id: str) -> dict[str, Any]:
    """The answer of the first router that knows the request; otherwise the last error."""
    from kvpool.cli.http import call

    error: ConfigError | UnavailableError | None = None
    for url in urls:
        try:
            found: dict[str, Any] = call(f"{url}/kvpool/explain/{urllib.parse.quote(request_id, safe='')}", timeout_s=ASK_TIMEOUT_S)
        except (ConfigError, UnavailableError) as caught:
            error = caught
        else:
            return found
    assert error is not None
    raise error


def _show(found: Mapping[str, Any]) -> None:
    tenant = f", tenant {found['tenant']}" if found["tenant"] else ""
    click.echo(f"request {found['request_id']}, answer {found['answer_id']}{tenant}")
    for job in found["jobs"]:
        if len(found["jobs"]) > 1:
            click.echo(f"\n{job['id']}")
        for decision in job["decisions"]:
            _show_decision(decision)
        if job["dropped"]:
            click.echo(f"\n{job['dropped']} more choices were made and not kept")
        _show_end(job)


def _show_decision(decision: Mapping[str, Any]) -> None:
    from kvpool.cli.screen import console, new_table, plain, short_id

    unit, when = decision["unit"], f"{decision['at_ms']:.1f} ms after it came"
    names = list(dict.fromkeys(name for candidate in decision["candidates"] for name in candidate["terms"]))[:_MOST_TERMS]
    columns = ("", "worker", f"cost ({unit})" if unit else "cost", *names, "resident", "pool", "active", "backlog")
    title = f"{decision['role']}, {when}: {decision['prompt_tokens']} prompt tokens, policy {decision['policy']}"
    table = new_table(title, tuple(map(plain, columns)))
    for candidate in decision["candidates"]:
        mark = "->" if candidate["worker"] == decision["chosen"] else ""
        worker = short_id(candidate["worker"]) + (" (suspect)" if candidate["suspect"] else "")
        terms = [_number(candidate["terms"].get(name)) for name in names]
        pool = sum(source["tokens"] for source in candidate["pool"])
        known = (candidate["resident_tokens"], pool, candidate["active"], candidate["backlog_tokens"])
        table.add_row(mark, worker, _number(candidate["cost"]), *terms, *map(str, known))
    console().print(table)
    if decision["left_out"]:
        click.echo(f"and {decision['left_out']} more candidates, all dearer")
    if decision["chosen"] is None:
        click.echo("nobody was chosen")


def _show_end(job: Mapping[str, Any]) -> None:
    end = job["happened"]
    state = "still running" if job["running"] else f"ended: {end['finish_reason'] or 'not complete'}"
    click.echo(f"\n{state}, {end['generated']} tokens generated, {end['retries']} retries")
    for phase in ("prefill", "decode"):
        if worker := end[f"{phase}_worker"]:
            sources = end["sources" if phase == "prefill" else "decode_sources"]
            told = "" if sources is None else ", ".join(f"{count} {name}" for name, count in sources.items())
            click.echo(f"{phase} on {worker[:8]}: {told or 'no account'}")
    times = [f"{name} {value:.1f}" for name, value in end["times_ms"].items() if value]
    click.echo(f"times (ms): {', '.join(times) or 'none yet'}")
    if end["fallbacks"]:
        click.echo(f"fallbacks: {', '.join(end['fallbacks'])}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
