"""A request that is not answered: its status, and what is wrong in it. Each protocol writes it in its own form."""

from edgespec.errors import EdgespecError

BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND, TOO_LONG, TOO_LARGE = 400, 401, 403, 404, 408, 413
UNSUPPORTED_TYPE, TOO_MANY, BROKEN, UNAVAILABLE = 415, 429, 500, 503
RETRY_AFTER_S = 5
# Codes of faults that are the server's, and not the request's
_BROKEN_CODES = {"E_UNEXPECTED", "E_READ_FAILED", "E_FILE_CHANGED", "E_NAN_LOGITS", "E_CACHE"}
_UNAVAILABLE_CODES = {"E_MEMORY", "E_ENGINE"}


class RefusalError(Exception):
    """Why a request is not answered."""

    def __init__(self, status: int, message: str, *, code: str = "invalid_request", field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, _encodable(message), code
        self.field = None if field is None else _encodable(field)  # of the body, where one is wrong

    @property
    def headers(self) -> dict[str, str]:
        """What a client has to know beside the body."""
        if self.status in {TOO_MANY, UNAVAILABLE}:
            return {"Retry-After": str(RETRY_AFTER_S)}
        return {"WWW-Authenticate": "Bearer"} if self.status == UNAUTHORIZED else {}


def _encodable(text: str) -> str:
    """Return a text that may quote half a surrogate pair of the body, as one that can be sent."""
    return text.encode(errors="backslashreplace").decode()


def refusal_of(error: Exception) -> RefusalError:
    """Return how an error that ended a request, or a text, is answered."""
    if isinstance(error, RefusalError):
        return error
    if not isinstance(error, EdgespecError):
        return RefusalError(
            BROKEN, f"unexpected {type(error).__name__}; the server's own output has more", code="E_UNEXPECTED"
        )
    broken = BROKEN if error.code in _BROKEN_CODES else BAD_REQUEST
    status = UNAVAILABLE if error.code in _UNAVAILABLE_CODES else broken
    return RefusalError(status, f"{error.what} {error.fix}", code=error.code)
