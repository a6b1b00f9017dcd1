"""Whose blocks a client works on: its token's tenant decides, and a node tells the salt."""

from dataclasses import replace

from kvpool.block import Namespace
from kvpool.client.sources import open_source
from kvpool.errors import AccessError, KvpoolError, LocalError, UnavailableError
from kvpool.security.salt import narrowed
from kvpool.wire.access_client import AccessRpc, Identity
from kvpool.wire.credentials import Security


async def own_namespace(source: str, namespace: Namespace, security: Security, timeout_s: float) -> Namespace:
    """`namespace` with the salt of the tenant that `security`'s token is bound to; a salt it already has is mixed in.

    Raises `AccessError` when the token is not known, `UnavailableError` with the reasons when no node answers.
    """
    me = await who_am_i(source, security, timeout_s)
    return replace(namespace, salt=narrowed(me.salt, namespace.salt)) if me.salt else namespace


async def who_am_i(source: str, security: Security, timeout_s: float) -> Identity:
    """Who the caller is to the nodes at `source`, by the first that answers. Errors as for `own_namespace`."""
    reasons: list[str] = []
    for address in await _addresses(source, security, timeout_s):
        client = AccessRpc(address, security=security)
        try:
            return await client.who_am_i(timeout_s)
        except (AccessError, LocalError):
            raise
        except KvpoolError as error:
            reasons.append(str(error))
        finally:
            await client.close()
    raise UnavailableError(f"no node says who this client is: {'; '.join(reasons) or 'there is none'}")


async def _addresses(source: str, security: Security, timeout_s: float) -> list[str]:
    if "://" not in source:
        return [part.strip() for part in source.split(",") if part.strip()]
    nodes = await open_source(source, timeout_s, security=security)
    try:
        return [ref.address for ref in nodes.nodes()]
    finally:
        await nodes.close()
