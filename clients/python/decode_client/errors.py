"""What can go wrong, one class per cause. Arguments that can be refused before anything is sent raise ``ValueError``.

::

    DecodeError
      ConnectionFailedError      no server there, or the connection broke      (also a ConnectionError)
      TimedOutError              the client stopped waiting                    (also a TimeoutError)
        NotReadyError            ``wait_until_ready`` ran out of time
      InvalidReplyError          the reply is not what the protocol says
      APIStatusError             the server answered with an error
        BadRequestError          400, 415
        AuthError                401, 403
        NotFoundError            404
        TooLargeError            413
        UnprocessableError       422
        RateLimitedError         429
        ServerError              5xx
          UnavailableError       503
            QueueFullError       503 of type ``queue_full``
          DeadlineExceededError  504                                           (also a TimeoutError)
"""

from __future__ import annotations


class DecodeError(Exception):
    """Base of all errors of this client.

    Attributes:
        message: what happened, for people.
        request_id: the ``X-Request-Id`` under which the server knows the request, or None.
    """

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id

    def __str__(self) -> str:
        return self.message if self.request_id is None else f"{self.message} (request {self.request_id})"


class ConnectionFailedError(DecodeError, ConnectionError):
    """No connection came about (in time), or it broke before the reply was whole."""


class TimedOutError(DecodeError, TimeoutError):
    """The client's ``timeout`` or the caller's ``deadline_s`` passed without a reply."""


class NotReadyError(TimedOutError):
    """The service did not become ready in the time that ``wait_until_ready`` was given; the message holds its state."""


class InvalidReplyError(DecodeError):
    """The reply is not what the protocol says: another program answers there, or a proxy changed it."""


class APIStatusError(DecodeError):
    """The server answered with an error status.

    Attributes:
        status: HTTP status code.
        type: the server's stable name of the error (``invalid_latents``), or ``http_<status>`` where whatever answered
            does not speak this protocol.
        param: the request field at fault, dotted, or None.
        retry_after: seconds after which the server suggests to try again, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        type: str,
        param: str | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, request_id=request_id)
        self.status = status
        self.type = type
        self.param = param
        self.retry_after = retry_after

    def __str__(self) -> str:
        details = [f"{self.status} {self.type}"]
        if self.param is not None:
            details.append(f"param {self.param}")
        if self.request_id is not None:
            details.append(f"request {self.request_id}")
        return f"{self.message} ({', '.join(details)})"


class BadRequestError(APIStatusError):
    """400 or 415: the body is not what its content type says, or the content type is not read there."""


class AuthError(APIStatusError):
    """401 or 403: the API key is missing, wrong, or not allowed to do this."""


class NotFoundError(APIStatusError):
    """404: no model of that name, or no service at that address and path."""


class TooLargeError(APIStatusError):
    """413: the body is larger than the server accepts."""


class UnprocessableError(APIStatusError):
    """422: a field is wrong, or the latents do not fit the model; ``param`` says which field."""


class RateLimitedError(APIStatusError):
    """429: too many requests from this caller."""


class ServerError(APIStatusError):
    """5xx: the server failed; 507 (``out_of_memory``) is a decode that does not fit the device."""


class UnavailableError(ServerError):
    """503: the model is not ready, the queue is full, or the ranks failed; nothing is wrong with the request."""


class QueueFullError(UnavailableError):
    """503 of type ``queue_full``: too many requests wait, or too large ones; nothing was started for this one."""


class DeadlineExceededError(ServerError, TimeoutError):
    """504: the deadline of the request, or of a proxy on the way, passed before the pixels were ready."""


_BY_STATUS: dict[int, type[APIStatusError]] = {
    400: BadRequestError,
    401: AuthError,
    403: AuthError,
    404: NotFoundError,
    413: TooLargeError,
    415: BadRequestError,
    422: UnprocessableError,
    429: RateLimitedError,
    503: UnavailableError,
    504: DeadlineExceededError,
}


def status_error_class(status: int, type: str) -> type[APIStatusError]:
    """The class for a status and the server's name of the error."""
    if status == 503 and type == "queue_full":
        return QueueFullError
    return _BY_STATUS.get(status, ServerError if status >= 500 else APIStatusError)
