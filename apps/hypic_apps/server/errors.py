"""What goes wrong, in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``.

Clients decide by the status whether to try again (429 and 5xx) and by ``code`` what to do about it. An error inside a
stream, whose status has been sent, is the same object as one event.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from hypic.errors import (
    ConfigError,
    HypicError,
    NonFiniteOutput,
    PromptError,
    PromptTooLong,
    RequestAborted,
    StoreFull,
    UnsupportedModel,
    WorkerLost,
)

LOG = logging.getLogger("hypic.server")
# How alike a misspelt address is, from 0 to 1; others of OpenAI's, such as /v1/moderations, are below.
LIKE = 0.78
FAILED = "the server failed on this request; its log has the reason."
TYPES: Mapping[int, str] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# The first that fits decides, so subclasses stand before their parents.
_ANSWERED: Sequence[tuple[type[HypicError], int, str]] = (
    (PromptTooLong, 400, "context_length_exceeded"),
    (StoreFull, 400, "store_full"),
    (PromptError, 400, "invalid_prompt"),
    (ConfigError, 400, "invalid_setting"),
    (UnsupportedModel, 400, "unsupported_model"),
    (NonFiniteOutput, 500, "non_finite_output"),
    (RequestAborted, 503, "request_aborted"),
    (WorkerLost, 503, "worker_lost"),
    (HypicError, 500, "engine_error"),
)


class ApiError(HTTPException):
    """An error as it goes to the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param, self.code = param, code

    @property
    def body(self) -> dict[str, Any]:
        return error_body(self.status_code, self.detail, self.param, self.code)


class ClientGone(Exception):
    """The client has closed its connection; nobody reads an answer."""


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON object of an error; halves of characters, which JSON may carry and UTF-8 cannot, are spelled out."""
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    field = None if param is None else _sendable(param)
    return {"error": {"message": _sendable(message), "type": kind, "param": field, "code": code}}


def _sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def refused(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be right: status 400."""
    return ApiError(400, message, param=param, code=code)


def api_error(error: HypicError, max_context: int) -> ApiError:
    """An error of the engine as the client gets it.

    Clients find an overflow by words in the message, which is why it says more than ours.
    """
    status, code = next((status, code) for kind, status, code in _ANSWERED if isinstance(error, kind))
    message = str(error)
    if isinstance(error, (PromptTooLong, StoreFull)):
        message = (
            f"This model's maximum context length is {max_context} tokens. However, {message} "
            f"(prompt is too long) [context_length_exceeded]"
        )
    headers = {"retry-after": "1"} if status == 503 else None
    return ApiError(status, message, param=_param(error), code=code, headers=headers)


def install_handlers(app: FastAPI) -> None:
    """Every error of the application leaves in the one shape; ``fields`` adds those of bodies."""
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(HypicError, _engine)
    app.add_exception_handler(ClientGone, _gone)
    app.add_exception_handler(Exception, _unexpected)


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status_code, headers=error.headers)


def _param(error: HypicError) -> str | None:
    """The setting that a ``ConfigError`` begins with; its messages say ``name is value; ...``."""
    name, separator, _ = str(error).partition(" is ")
    return name if isinstance(error, ConfigError) and separator and name.isidentifier() else None


async def _http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException), "registered for this class"
    if isinstance(error, ApiError):
        return error_response(error)
    message = f"{request.method} {request.url.path}: {_told(request, error)}"
    return JSONResponse(error_body(error.status_code, message), error.status_code, headers=error.headers)


def _told(request: Request, error: HTTPException) -> str:
    """What is wrong with an address or a method, and which would be right."""
    if error.status_code not in (404, 405):
        return f"{error.detail}."
    known: Mapping[str, Mapping[str, object]] = request.app.openapi()["paths"]
    if error.status_code == 405:
        # A path with a name in it stands under its pattern, and a page of FastAPI's own under nothing.
        allowed = (error.headers or {}).get("Allow", "another").split(", ")
        methods = " or ".join(sorted(method.upper() for method in known.get(request.url.path, allowed)))
        return f"this address does not take that method; send {methods}."
    near = [f"/v1{request.url.path}", *get_close_matches(request.url.path, known, 1, LIKE)]
    meant = next((path for path in near if path in known), None)
    way_out = f"there are {', '.join(known)}." if meant is None else f"did you mean {meant}?"
    return f"there is no such address; {way_out}"


async def _engine(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HypicError), "registered for this class"
    return error_response(api_error(error, request.app.state.service.engine.max_context))


async def _gone(request: Request, error: Exception) -> JSONResponse:
    """Nobody reads it; the status is the one that proxies log for this."""
    return JSONResponse(error_body(499, "the client closed the connection."), 499)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    LOG.error("request %s failed", request.state.request_id, exc_info=error)
    body = error_body(500, FAILED, code="internal_error")
    return JSONResponse(body, 500, headers={"x-request-id": request.state.request_id})
