"""Frames and runs over plain TCP: from the arena to the socket and from the socket to where they belong, without a copy in Python."""

from kvpool.transport.tcp.index import Index, MemoryIndex, Taken
from kvpool.transport.tcp.line import Peer, Want
from kvpool.transport.tcp.reach import TcpReach
from kvpool.transport.tcp.server import MAX_CONNECTIONS, TcpServer
from kvpool.transport.tcp.serving import Admit, Served

__all__ = ["MAX_CONNECTIONS", "Admit", "Index", "MemoryIndex", "Peer", "Served", "Taken", "TcpReach", "TcpServer", "Want"]
