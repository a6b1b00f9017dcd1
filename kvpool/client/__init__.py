"""The SDK: `connect`, `connect_async`, and the key-level `AsyncPoolClient` that workers use."""

from kvpool.client.pool import AsyncPoolClient
from kvpool.client.retention import Retention
from kvpool.client.sdk import AsyncClient, Client, Got, connect, connect_async
from kvpool.client.views import View

__all__ = ["AsyncClient", "AsyncPoolClient", "Client", "Got", "Retention", "View", "connect", "connect_async"]
