"""What goes wrong, in OpenAI's words: HTTP status and `{"error": {"message", "type", "param", "code"}}`."""

from collections.abc import Mapping
from typing import Any

from kvpool.errors import ConfigError, DeadlineError, KvpoolError, UnavailableError
from router.queue.refusal import RefusedError


class ApiError(Exception):
    """A request that ends in an error answer; never leaves the router but as JSON."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`kind` is OpenAI's `type`."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.kind = kind
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON value of the answer, or of the last event of a stream."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(message: str, *, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """400: the caller must change the request."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, why: str) -> ApiError:
    """400: a parameter that would change the answer and that this server does not implement."""
    return ApiError(400, f"{param} is not supported by this server: {why}", param=param, code="unsupported_parameter")


def model_not_found(model: str, served: str) -> ApiError:
    """404: another model than the served one."""
    return ApiError(404, f"The model {model!r} does not exist; this server serves {served!r}.", param="model", code="model_not_found")


def context_length_exceeded(limit: int, prompt: int, answer: int, *, param: str) -> ApiError:
    """400: prompt and answer don't fit the model's context."""
    asked = f"you requested {prompt + answer} tokens ({prompt} in the prompt, {answer} in the completion)"
    message = f"This model's maximum context length is {limit} tokens, but {asked}. Please shorten the prompt or the completion."
    return ApiError(400, message, param=param, code="context_length_exceeded")


def body_too_large(limit: int) -> ApiError:
    """413."""
    return ApiError(413, f"The request body is larger than {limit} bytes.", code="request_too_large")


def body_too_slow(limit_s: float) -> ApiError:
    """408."""
    return ApiError(408, f"The request body did not arrive within {limit_s:g} s.", code="request_timeout")


def too_many_requests(limit: int) -> ApiError:
    """429, with the time after which to try again."""
    message = f"{limit} requests are in flight, which is this server's limit; try again shortly."
    return ApiError(429, message, code="too_many_requests", kind="rate_limit_error", headers={"retry-after": "1"})


def unauthorized(message: str, *, code: str) -> ApiError:
    """401: no API key, or a wrong one."""
    return ApiError(401, message, code=code, headers={"www-authenticate": "Bearer"})


def forbidden(message: str) -> ApiError:
    """403: an API key without the right."""
    return ApiError(403, message, code="insufficient_permissions")


def above_rate(tenant: str, wait_s: int) -> ApiError:
    """429: a tenant asks more often than it may."""
    message = f"Rate limit reached for {tenant}; try again in {wait_s} s."
    return ApiError(429, message, code="rate_limit_exceeded", kind="rate_limit_error", headers={"retry-after": str(wait_s)})


def refused(error: RefusedError) -> ApiError:
    """429: too many wait, or it would not be answered in time."""
    headers = {"retry-after": str(error.retry_after_s)}
    return ApiError(429, f"{error}.", code="overloaded", kind="rate_limit_error", headers=headers)


def not_found(path: str) -> ApiError:
    """404: no such path."""
    return ApiError(404, f"Unknown request URL: {path}. See docs/api.md for the supported paths.", code="unknown_url")


def request_not_found(id: str) -> ApiError:
    """404: a request that this router doesn't remember, or whose answer is not for the caller."""
    return ApiError(404, f"No request {id[:128]!r} among the last of this router.", code="request_not_found")


def too_many_recordings(limit: int) -> ApiError:
    """429: others record already."""
    message = f"{limit} recordings are under way, which is this server's limit."
    return ApiError(429, message, code="too_many_recordings", kind="rate_limit_error", headers={"retry-after": "60"})


def internal() -> ApiError:
    """500: a fault of ours; details are in the log only."""
    return ApiError(500, "The server had an error while processing your request.", code="internal_error", kind="server_error")


def of_failure(error: KvpoolError) -> ApiError:
    """The answer for a request that kvpool could not serve."""
    if isinstance(error, ConfigError):
        return bad_request(str(error))
    if isinstance(error, RefusedError):
        return refused(error)
    if isinstance(error, DeadlineError):
        return ApiError(504, f"The request timed out: {error}", code="timeout", kind="server_error")
    if isinstance(error, UnavailableError):
        message = f"The service is unavailable: {error}"
        return ApiError(503, message, code="service_unavailable", kind="server_error", headers={"retry-after": "5"})
    return internal()
