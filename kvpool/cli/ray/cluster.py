"""A cluster that Ray places, restarts and scales. To its users it is a `LocalCluster`.

    with RayCluster(ClusterOptions(port=0), address="local", limits=Limits(least=1, most=4)) as cluster:
        cluster.wait_ready()

With `address="local"` everything runs on this machine, in a Ray of our own that ends with it, and members meet at the embedded
server. With the address of a Ray cluster they meet at `membership_url`, which every host must reach.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from kvpool.cli.procs import ClusterOptions
from kvpool.cli.ray.engine import RayEngine
from kvpool.cli.ray.placement import SCALED_ROLES
from kvpool.cli.ray.samples import Sampler
from kvpool.cli.ray.scaling import GroupScale, Limits, Rules
from kvpool.cli.ray.table import RayTable
from kvpool.cli.supervisor import LocalCluster
from kvpool.cluster.url import parse_cluster_url
from kvpool.errors import ConfigError

SAMPLE_EVERY_S = 2.0
TTFT_TARGET_S = 2.0
PREFILL_RULES = Rules(requests_each=2, ttft_s=TTFT_TARGET_S)
"""Prefill computes one chunk after another: who is behind two others waits."""
DECODE_RULES = Rules(requests_each=8, ttft_s=None)
DECODE_ALONE_RULES = Rules(requests_each=4, ttft_s=TTFT_TARGET_S)
"""Where no prefill workers are, the first token comes from here."""


class RayCluster(LocalCluster):
    """The cluster described by `options`, in the hands of the Ray at `address`. Raises `ConfigError` for what can't be."""

    def __init__(
        self,
        options: ClusterOptions | None = None,
        *,
        address: str,
        membership_url: str | None = None,
        limits: Limits | None = None,
        **more: Any,
    ) -> None:
        """`limits` bounds both worker groups, which then follow the load; without it they keep their size.

        `more` is as for `LocalCluster`.
        """
        options = options or ClusterOptions()
        engine = RayEngine(address)
        if engine.local and membership_url is not None:
            raise ConfigError("--ray local runs its own membership server; --cluster is for the address of a Ray cluster")
        if not engine.local and membership_url is None:
            raise ConfigError(f"the members of --ray {address} have to meet somewhere: --cluster redis://HOST:PORT/0?cluster=NAME")
        if membership_url is not None and parse_cluster_url(membership_url).kind == "memory":
            raise ConfigError("an in-memory cluster ends at this process; --cluster needs a server that every host reaches")
        self._scales = {} if limits is None else _scales(options, limits)
        self._ray_table: RayTable | None = None
        self._sampler = Sampler()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow_load, name="kvpool-ray-scaling", daemon=True)
        make = partial(
            RayTable,
            engine=engine,
            node_bytes=options.capacity_bytes,
            least={} if limits is None else dict.fromkeys(self._scales, limits.least),
            most={} if limits is None else dict.fromkeys(self._scales, limits.most),
        )
        super().__init__(options, membership_url=membership_url, table=partial(self._keep_table, make), **more)

    def start(self) -> None:
        """Start or reach Ray, ask it for every process, and return. Raises as `LocalCluster.start`."""
        super().start()
        if self._scales:
            self._thread.start()

    def stop(self, grace_s: float = 10.0) -> None:
        """End everything, as `LocalCluster.stop`; a Ray of our own too."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        super().stop(grace_s)

    def _keep_table(self, make: Callable[..., RayTable], *args: Any, **more: Any) -> RayTable:
        self._ray_table = make(*args, **more)
        return self._ray_table

    def _follow_load(self) -> None:
        roles = tuple(self._scales)
        while not self._ended.wait(SAMPLE_EVERY_S):
            for role, sample in self._sampler.sample(self.membership.members(), roles).items():
                before = self._scales[role].wanted
                wanted = self._scales[role].step(sample)
                if wanted != before and self._ray_table is not None:
                    self._ray_table.scale(role, wanted)


def _scales(options: ClusterOptions, limits: Limits) -> dict[str, GroupScale]:
    """A scale for each group that the cluster has."""
    rules = {"prefill": PREFILL_RULES, "decode": DECODE_RULES if options.prefill else DECODE_ALONE_RULES}
    return {role: GroupScale(rules[role], limits, wanted=getattr(options, role)) for role in SCALED_ROLES if getattr(options, role)}
