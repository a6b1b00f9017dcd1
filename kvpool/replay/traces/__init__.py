"""Request traces: public ones and our own, read into one form (docs/replay.md)."""

from kvpool.replay.traces.prompts import Prompts
from kvpool.replay.traces.read import FORMATS, read_trace
from kvpool.replay.traces.values import RawRequest, Trace, TraceRequest, make_trace

__all__ = ["FORMATS", "Prompts", "RawRequest", "Trace", "TraceRequest", "make_trace", "read_trace"]
