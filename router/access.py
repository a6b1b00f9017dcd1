"""Who sends a request, by its API key, and whose KV it works on.

An API key is a token of the same table that nodes look at. Its tenant decides the salt of all keys of its blocks; a `cache_salt` in the
body is mixed into that salt and can so only keep apart what would be shared. Without a table of tokens everybody may ask.
"""

from starlette.requests import Request

from kvpool.clock import Clock
from kvpool.errors import AccessError
from kvpool.policy.rates import Rates, TenantLimits
from kvpool.request import Scope
from kvpool.security.principal import ANYBODY, Principal, Right
from kvpool.security.salt import narrowed
from kvpool.units import SECOND
from kvpool.wire.guard import Guard
from router.api.errors import above_rate, forbidden, unauthorized

_BEARER = "bearer "


class Access:
    """Looks at the API keys of requests by `guard`. Rates are of this router: a tenant, or a key, has them once per router."""

    def __init__(self, guard: Guard, clock: Clock, key_requests_per_s: float = 0.0) -> None:
        """`key_requests_per_s` bounds each key, whatever its tenant may; 0: it doesn't."""
        self._guard = guard
        self._clock = clock
        self._rates = Rates(guard.limits)
        of_a_key = TenantLimits(requests_per_s=key_requests_per_s)
        self._keys = Rates(lambda name: of_a_key)

    def check(self, request: Request, *rights: Right) -> Principal:
        """Who sends `request`, which takes all of `rights`. Raises the 401, 403 or 429 error."""
        if self._guard.tokens is None:
            return ANYBODY
        given = request.headers.getlist("authorization")
        if len(given) != 1 or not given[0].lower().startswith(_BEARER):
            raise unauthorized(
                "You didn't provide an API key. Send it once, in an Authorization header: Bearer YOUR_KEY.", code="missing_api_key"
            )
        try:
            principal = self._guard.tokens.principal(given[0][len(_BEARER) :].strip())
        except AccessError:
            raise unauthorized("Incorrect API key provided, or it was revoked.", code="invalid_api_key") from None
        if missing := [right for right in rights if not principal.may(right)]:
            raise forbidden(f"This API key lacks the right {missing[0]!r} that {request.url.path} takes.")
        if wait_ns := self._keys.admit(principal.name, self._clock.now_ns()):
            raise above_rate(f"key {principal.name}", max(1, -(-wait_ns // SECOND)))
        if principal.tenant is not None and (wait_ns := self._rates.admit(principal.tenant, self._clock.now_ns())):
            raise above_rate(principal.tenant, max(1, -(-wait_ns // SECOND)))
        return principal

    def scope(self, principal: Principal, wish: str) -> Scope:
        """Whose KV a request of `principal` works on; `wish` is its `cache_salt`. Raises `ConfigError` without a cluster secret."""
        salt = self._guard.salt_of(principal.tenant)
        return Scope(salt=narrowed(salt, wish.encode()), tenant=principal.tenant or "")
