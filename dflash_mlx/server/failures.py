"""What a client is told when something fails: a status, and a body in the shape its protocol expects."""

from dataclasses import dataclass, field
from typing import Any

from dflash_mlx.errors import ContextError, DFlashError
from dflash_mlx.server.worker import QueueFullError, WorkerClosedError

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class RequestError(DFlashError):
    """A request that cannot be served as it is. `param` names the field, `code` is OpenAI's machine-readable word."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An exception as a client may see it. Unknown exceptions are ours, and their text stays here.

    anthropic_message: where Anthropic's clients look for other words.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    anthropic_message: str | None = None

    def openai(self) -> dict[str, Any]:
        kind = _OPENAI_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.anthropic_message or self.message}}

    def ollama(self) -> dict[str, Any]:
        return {"error": self.message}


def failure(error: BaseException) -> Failure:
    """What to tell a client about an exception."""
    if isinstance(error, RequestError):
        return Failure(
            status=error.status, message=str(error), param=error.param, code=error.code, headers=error.headers
        )
    if isinstance(error, QueueFullError):
        wait = {"Retry-After": str(max(1, error.retry_after))}
        return Failure(status=429, message=str(error), code="queue_full", headers=wait)
    if isinstance(error, WorkerClosedError):
        return Failure(status=503, message=str(error), code="unavailable")
    if isinstance(error, ContextError):
        return _context_failure(error)
    if isinstance(error, DFlashError):
        return Failure(status=400, message=str(error))
    return Failure(status=500, message="the server failed at this request; its own log says more.")


def _context_failure(error: ContextError) -> Failure:
    """In the words and with the code by which clients know that they have to shorten a conversation."""
    return Failure(
        status=400,
        message=f"This model's maximum context length is {error.limit} tokens. However, the prompt has {error.tokens} "
        "tokens. Shorten it, so that room is left for an answer.",
        code="context_length_exceeded",
        anthropic_message=f"prompt is too long: {error.tokens} tokens > {error.limit} maximum",
    )
