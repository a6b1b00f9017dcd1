"""One-sided transfers through UCX: a thin binding of our own on libucp. Importing this package loads no library; the first use does."""

from kvpool.transport.ucx.library import LIBRARY_VARIABLE, UcpLibrary, load_ucp
from kvpool.transport.ucx.process import UcxTargetProcess
from kvpool.transport.ucx.reach import UcxReach
from kvpool.transport.ucx.session import TRANSPORTS_VARIABLE, UcxSettings
from kvpool.transport.ucx.target import UcxTarget

__all__ = ["LIBRARY_VARIABLE", "TRANSPORTS_VARIABLE", "UcpLibrary", "UcxReach", "UcxSettings", "UcxTarget", "UcxTargetProcess", "load_ucp"]
