"""Why each request went where it went: the last choices of this router with all their candidates, and what became of them."""

from router.decisions.ring import Decisions, Explained, Note, Request
from router.decisions.spell import spelled

__all__ = ["Decisions", "Explained", "Note", "Request", "spelled"]
