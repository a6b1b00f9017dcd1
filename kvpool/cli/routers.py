"""Which router a command asks."""

from kvpool.errors import ConfigError, UnavailableError


def router_urls(cluster: str | None) -> list[str]:
    """The routers of the cluster, by default the one that runs here. Raises `UnavailableError` when there is none."""
    from kvpool.cli.snapshot import open_cluster
    from kvpool.cli.state import find_cluster

    with open_cluster(find_cluster(cluster)) as membership:
        urls = [member.info["url"] for member in membership.members() if member.role == "router" and "url" in member.info]
    if not urls:
        raise UnavailableError("no router has joined the cluster; name one with --router")
    return urls


def router_url(given: str | None, cluster: str | None) -> str:
    """`given`, or the cluster's only router. Raises `ConfigError` when there are several."""
    if given is not None:
        return given.rstrip("/")
    urls = router_urls(cluster)
    if len(urls) > 1:
        raise ConfigError(f"the cluster has {len(urls)} routers ({', '.join(urls)}); name one with --router")
    return urls[0]
