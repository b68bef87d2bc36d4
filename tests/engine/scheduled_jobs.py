"""Jobs for schedulers, which run until they are let go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any


class Jobs:
    """Jobs that run until they are let go, and the order in which they started."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ranks: dict[str, list[int]] = {}
        self._gates: dict[str, asyncio.Event] = {}

    def job(self, name: str) -> Callable[[Sequence[int]], Awaitable[str]]:
        gate = self._gates[name] = asyncio.Event()

        async def work(ranks: Sequence[int]) -> str:
            self.started.append(name)
            self.ranks[name] = list(ranks)
            await gate.wait()
            return name

        return work

    def finish(self, *names: str) -> None:
        for name in names:
            self._gates[name].set()


def run(test: Callable[[Jobs], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(Jobs()), 10))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)
