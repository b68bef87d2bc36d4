"""One id for every request: the caller's own where it is sane, echoed in every reply, of success or error alike."""

from __future__ import annotations

import logging
import uuid
from typing import TypeGuard

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decode_service.http.errors import internal_error_response

HEADER = "X-Request-Id"
MAX_CHARS = 128

logger = logging.getLogger(__name__)


def is_sane_id(offered: str | None) -> TypeGuard[str]:
    """Whether ``offered`` is 1 to 128 printable ASCII characters: ids end up in logs and headers."""
    return offered is not None and 0 < len(offered) <= MAX_CHARS and offered.isascii() and offered.isprintable()


def sane_request_id(offered: str | None) -> str:
    """``offered`` if it is sane, else a new id."""
    return offered if is_sane_id(offered) else uuid.uuid4().hex


def request_id_of(scope: Scope) -> str:
    """The id that ``RequestIdMiddleware`` gave to the request of ``scope``."""
    request_id: str = scope["state"]["request_id"]
    return request_id


class RequestIdMiddleware:
    """Gives the request its id, and turns exceptions that nobody handled into a 500 that carries it.

    The latter is here because Starlette's own handler for such exceptions runs outside of all middleware and raises them
    again.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = sane_request_id(Headers(scope=scope).get(HEADER))
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except ClientDisconnect:
            logger.info("caller left: %s %s, request %s", scope["method"], scope["path"], request_id)
        except Exception:
            logger.exception("%s %s failed, request %s", scope["method"], scope["path"], request_id)
            if started:
                # Too late for an error reply. Raised again, the server closes the connection, and the announced length
                # tells the caller that the body was cut off.
                raise
            await internal_error_response(request_id)(scope, receive, send_with_id)
