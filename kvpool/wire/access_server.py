"""Who a caller is to this server, and the rates of tenants: the servicer of access.proto."""

import asyncio
from typing import Any

import grpc.aio

from kvpool.errors import ConfigError, KvpoolError
from kvpool.security.principal import Right
from kvpool.wire.auth import caller
from kvpool.wire.gen import access_pb2 as pb
from kvpool.wire.gen import access_pb2_grpc as rpc
from kvpool.wire.guard import Guard
from kvpool.wire.status import code_of


def add_access(server: grpc.aio.Server, guard: Guard) -> None:
    """Answer from `guard` on `server`."""
    rpc.add_AccessServicer_to_server(_Servicer(guard), server)


class _Servicer(rpc.AccessServicer):
    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def WhoAmI(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        who = caller()
        try:
            salt = self._guard.salt_of(who.tenant)
        except KvpoolError as error:
            await context.abort(code_of(error), str(error))
        rights = sorted(who.rights) if self._guard.tokens is not None else sorted(Right)
        return pb.WhoAmIResponse(name=who.name, tenant=who.tenant, rights=rights, salt=salt)

    async def SetRates(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            if self._guard.book is None:
                raise ConfigError("this server keeps no limits; start it with --tenants FILE")
            rates = {"requests_per_s": request.requests_per_s, "bytes_per_s": request.bytes_per_s}
            await asyncio.to_thread(self._guard.book.change, request.tenant, **rates)
        except KvpoolError as error:
            await context.abort(code_of(error), str(error))
        return pb.SetRatesResponse()
