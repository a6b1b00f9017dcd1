"""What one job's prompt needs: its keys in each worker's namespace, and how much of it the pool is known to hold."""

from kvpool.block import BlockKey, chain_keys
from router.attention import sees_all
from router.job import Job
from router.worker import Worker

Space = tuple[bytes, int]
"""(root of the keys without a salt, tokens in a block): workers with the same have the same keys."""


class Need:
    """Of one job. Keys are made once per space."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._keys: dict[Space, list[BlockKey]] = {}
        self._held: dict[Space, int] = {}
        self._none: list[BlockKey] = []

    def alone(self, worker: Worker) -> bool:
        """Whether `worker` computes all of it by itself, whoever has what of it."""
        return sees_all(self.job, worker)

    def keys(self, worker: Worker) -> list[BlockKey]:
        """Keys of the prompt's full blocks in the worker's namespace; none when it can't make use of them (`alone`)."""
        if self.alone(worker):
            return self._none
        space = _space(worker)
        if space not in self._keys:
            self._keys[space] = chain_keys(worker.root_of(self.job.scope, self.job.adapter), self.job.prompt, worker.block_tokens)
        return self._keys[space]

    def keys_with(self, worker: Worker, generated: list[int]) -> list[BlockKey]:
        """Keys of the full blocks of prompt and answer, but for the answer's last token, whose KV nobody needed."""
        keys = self.keys(worker)
        rest = (*self.job.prompt, *generated[:-1])[len(keys) * worker.block_tokens :]
        parent = keys[-1] if keys else None
        return [*keys, *chain_keys(worker.root_of(self.job.scope, self.job.adapter), rest, worker.block_tokens, parent=parent)]

    def known(self, worker: Worker) -> bool:
        """Whether somebody has said how much of it the pool holds."""
        return _space(worker) in self._held

    def held(self, worker: Worker) -> int:
        """Leading blocks that the pool holds for `worker`, as far as somebody has said so."""
        return self._held.get(_space(worker), 0)

    def hold(self, worker: Worker, blocks: int) -> None:
        """The pool is known to hold so many leading blocks for `worker` and all of its namespace."""
        self._held[_space(worker)] = max(blocks, self._held.get(_space(worker), 0))

    def supposing(self, worker: Worker) -> "Need":
        """The same, as if the pool held all of it for `worker` and its namespace."""
        other = Need(self.job)
        other._keys, other._held = self._keys, dict(self._held)
        other.hold(worker, len(self.keys(worker)))
        return other


def _space(worker: Worker) -> Space:
    return worker.root, worker.block_tokens
