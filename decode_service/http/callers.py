"""Who a request is from, as far as the order of the queue goes: callers take turns.

It is what callers say of themselves, and no protection from those that lie: a gateway that knows them can set the header.
"""

from __future__ import annotations

from starlette.requests import Request

from decode_service.http.request_id import is_sane_id

HEADER = "X-Client-Id"


def caller_of(request: Request) -> str:
    """The caller's ``X-Client-Id`` where it is sane, otherwise its address.

    The address is the first one of ``X-Forwarded-For``, which load balancers set, or else the peer's. Serve's HAProxy sets
    no such header: behind it alone, callers that do not name themselves are one caller.
    """
    named = request.headers.get(HEADER)
    if is_sane_id(named):
        return f"id {named}"
    forwarded = request.headers.get("X-Forwarded-For", "").partition(",")[0].strip()
    if is_sane_id(forwarded):
        return f"address {forwarded}"
    return f"address {request.client.host}" if request.client else ""
