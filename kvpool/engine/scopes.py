"""The parts of an engine as each tenant's requests see them: another root of all keys, another view of the pool.

Nothing is copied: the model and the blocks of the worker are shared, and the keys keep tenants apart in them.
"""

from collections import OrderedDict
from dataclasses import replace

from kvpool.engine.sequence import Parts
from kvpool.request import EVERYBODY, Scope

MAX_SCOPES = 1024
"""Scopes whose view is kept; making one again takes well under a millisecond."""


class Scopes:
    """Views of `parts`, the least recently used ones forgotten first."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._known: OrderedDict[Scope, Parts] = OrderedDict()

    def parts(self, scope: Scope) -> Parts:
        """The parts for requests of `scope`."""
        if scope == EVERYBODY:
            return self._parts
        found = self._known.get(scope)
        if found is None:
            namespace = replace(self._parts.model.namespace, salt=scope.salt)
            found = replace(self._parts, root=namespace.root(), store=self._parts.store.scoped(scope))
            self._known[scope] = found
            if len(self._known) > MAX_SCOPES:
                self._known.popitem(last=False)
        self._known.move_to_end(scope)
        return found
