"""Work on bytes, in a thread where it takes long enough to hold the event loop up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

#: Fewer bytes than these are looked through, copied or put together in less time than a thread takes to begin: on cores that all
#: decode that is up to milliseconds.
SMALL_BYTES = 1 << 18


async def over_bytes(nbytes: int, function: Callable[..., T], *arguments: Any) -> T:
    """``function(*arguments)``, which goes through ``nbytes``."""
    if nbytes <= SMALL_BYTES:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)
