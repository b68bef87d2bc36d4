"""Stop waiting for work whose caller has left.

Ray Serve cancels a handler when its caller disconnects; plain ASGI servers only say so to who asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled as soon as the caller disconnects or this call is cancelled.

    The request's body must have been read to its end.

    Raises:
        ClientDisconnect: the caller left first.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and gone.exception() is None:
            raise ClientDisconnect()
        # A failure to listen says nothing about the caller: the work goes on.
        return await task
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
        # A failure holds this frame by its traceback, and the task holds the failure: with the latents, for as long as nobody
        # collects cycles.
        del task, gone


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
