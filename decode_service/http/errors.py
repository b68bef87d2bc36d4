"""Every error reply of every status is ``{"error": {"type", "message", "param", "request_id"}}``; this is where they are made."""

from __future__ import annotations

import http
import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from decode_service.errors import DecodeServiceError

logger = logging.getLogger(__name__)


def error_response(error: DecodeServiceError, request_id: str, extra: Mapping[str, Any] | None = None) -> Response:
    """The reply for ``error``; ``extra`` are further keys beside ``error``."""
    headers = {}
    if error.retry_after_s is not None:
        # The header knows whole seconds only, and earlier than asked would be refused again.
        headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    return _reply(error.status, error.type, error.message, error.param, request_id, headers, extra)


def internal_error_response(request_id: str) -> Response:
    """The reply for an exception that nobody expected: what it says is for the log, not for the caller."""
    message = f"the server failed unexpectedly; its log has the details under request id {request_id}"
    return _reply(500, DecodeServiceError.type, message, None, request_id)


def install_error_handlers(app: FastAPI) -> None:
    """Make all errors that routes and routing raise answer in the one form. (``RequestIdMiddleware`` does the unexpected.)"""

    async def on_service_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, DecodeServiceError)
        request_id = request.state.request_id
        if error.status >= 500:
            logger.warning("request %s: %s: %s", request_id, error.type, error.message)
        return error_response(error, request_id)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.scope["path"][:200]
        message = str(error.detail)
        if error.status_code == 404:
            message = f"no route {request.method} {path!r}: there are {', '.join(_routes(app))}, GET /docs"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"{request.method} is not allowed on {path!r}: use {allowed}"
        return _reply(
            error.status_code, _type_name(error.status_code), message, None, request.state.request_id, error.headers
        )

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:]) or None
        return _reply(422, "invalid_request", str(first["msg"]), param, request.state.request_id)

    app.add_exception_handler(DecodeServiceError, on_service_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(RequestValidationError, on_validation_error)


def _routes(app: FastAPI) -> list[str]:
    return [
        f"{'/'.join(sorted(route.methods or ()))} {route.path_format}"
        for route in app.routes
        if isinstance(route, APIRoute) and route.include_in_schema
    ]


def _type_name(status: int) -> str:
    try:
        return http.HTTPStatus(status).phrase.lower().replace(" ", "_").replace("-", "_")
    except ValueError:
        return "http_error"


def _reply(
    status: int,
    type_name: str,
    message: str,
    param: str | None,
    request_id: str,
    headers: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Response:
    error = {"type": type_name, "message": message, "param": param, "request_id": request_id}
    return JSONResponse({"error": error, **(extra or {})}, status_code=status, headers=headers)
