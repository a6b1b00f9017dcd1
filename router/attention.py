"""Which attention technique a job is decoded with, and what that asks of its way (docs/attention.md). Texts are `parse_attention`'s.

A prompt is always read whole, so a prefill knows nothing of it. A job that chooses none is decoded with its first decode worker's own,
by all that continue it. A technique that must see the whole prompt's queries gets nothing from a prefill elsewhere or from the pool: such
a job goes to a decode worker at once, and whoever holds its blocks doesn't matter.
"""

from functools import lru_cache

from kvpool.engine.attention.settings import FULL, TECHNIQUES, parse_attention
from kvpool.errors import ConfigError
from router.job import Job
from router.worker import Worker

NAMES = (FULL, *TECHNIQUES)


def parse_choices(text: str) -> frozenset[str]:
    """The names that requests may choose, from a comma-separated list; "" is none. Raises `ConfigError`."""
    names = frozenset(filter(None, (name.strip() for name in text.split(","))))
    if unknown := sorted(names - {*NAMES}):
        raise ConfigError(f"--attention-choices has {', '.join(unknown)}; there are {', '.join(NAMES)}")
    return names


def name_in(text: str) -> str:
    """The technique's name, without its settings."""
    return text.partition(":")[0]


def suits(text: str, worker: Worker) -> bool:
    """Whether the decode worker `worker` would do as `text` says: one that doesn't know of techniques would read everything."""
    return text in ("", FULL) or bool(worker.said.attention)


def sees_all(job: Job, worker: Worker) -> bool:
    """Whether `worker` has to compute all of the prompt to decode `job`."""
    text = job.attention or worker.said.attention
    return bool(text) and _sees_all(text)


@lru_cache(maxsize=64)
def _sees_all(text: str) -> bool:
    settings = parse_attention(text)
    return settings is not None and settings.prompt_queries is None
