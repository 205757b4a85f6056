"""How a request fails: TensorFlow's codes, and HTTP's for them."""

from __future__ import annotations

# As TensorFlow Serving maps them.
_HTTP = {
    "CANCELLED": 499,
    "INVALID_ARGUMENT": 400,
    "DEADLINE_EXCEEDED": 504,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "PERMISSION_DENIED": 403,
    "RESOURCE_EXHAUSTED": 429,
    "FAILED_PRECONDITION": 400,
    "ABORTED": 409,
    "OUT_OF_RANGE": 400,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "UNAUTHENTICATED": 401,
}


class RequestError(Exception):
    """A request that can't be answered.

    Args:
        code: name of a gRPC status, such as `"NOT_FOUND"`.
        message: what the client is told.
    """

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code
        self.message = message

    @property
    def http_status(self) -> int:
        """The same code in HTTP."""
        return _HTTP.get(self.code, 500)


def invalid(message: str) -> RequestError:
    """The client's mistake."""
    return RequestError("INVALID_ARGUMENT", message)
