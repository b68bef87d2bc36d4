"""Work on bytes: at once where they are few, in a thread where they are many."""

from __future__ import annotations

import asyncio
import threading

import pytest

from decode_service.engine.off_loop import SMALL_BYTES, over_bytes


@pytest.mark.parametrize(("nbytes", "here"), [(SMALL_BYTES, True), (SMALL_BYTES + 1, False)])
def test_many_bytes_go_to_a_thread_and_few_do_not(nbytes: int, here: bool) -> None:
    async def test() -> bool:
        return await over_bytes(nbytes, lambda thread: threading.current_thread() is thread, threading.current_thread())

    assert asyncio.run(test()) is here
