"""A group whose ranks are threads of this process: for tests, and for embedding the engine without Ray.

The ranks are real: each has a decoder of its own and talks to its peers through a ``ThreadCommunicator``. What it can't do
is what only processes can: a rank that stalls can't be killed, so its thread is left behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from decode_client.wire import WireTensor

from decode_service.config import ServiceConfig
from decode_service.decoding.communicator import ThreadCommunicator
from decode_service.engine.agreement import Agreement
from decode_service.engine.failures import describe_failure
from decode_service.engine.outcomes import settle
from decode_service.engine.places import RankPlace
from decode_service.engine.protocol import GroupInfo, RankError, RankFailure, RankPixels, RankTask
from decode_service.engine.rank_worker import RankWorker

logger = logging.getLogger("decode_service.engine")

T = TypeVar("T")


class LocalGroup:
    """A ``RankGroup`` of threads.

    Args:
        config: the settings of the application.
        make_worker: builds one rank; for tests that need ranks which fail.
    """

    def __init__(
        self, config: ServiceConfig, make_worker: Callable[[ServiceConfig, RankPlace], RankWorker] = RankWorker
    ) -> None:
        self._config = config
        self._make_worker = make_worker
        self._compile = config.compile_enabled()
        self._workers: list[RankWorker] = []
        self._threads: list[ThreadPoolExecutor] = []
        self._agreement = Agreement()

    @property
    def size(self) -> int:
        return self._config.group.ranks

    async def start(self) -> GroupInfo:
        """Load the model on each rank and join them; see ``RankGroup``."""
        self._threads = [ThreadPoolExecutor(1, f"rank-{rank}") for rank in range(self.size)]
        places = [RankPlace(rank, self.size, self.size) for rank in range(self.size)]
        self._workers = [self._make_worker(self._config, place) for place in places]

        async def load(without: frozenset[str]) -> list[GroupInfo]:
            # One after another: they share the cores, and Python's imports.
            return [
                await self._on(rank, self._workers[rank].load, self._compile, True, without)
                for rank in range(self.size)
            ]

        info = await self._agreement.load(load)
        self._join()
        return info

    async def run(self, task: RankTask, latents: WireTensor, ranks: Sequence[int]) -> list[RankPixels]:
        """Carry out ``task`` on ``ranks``; see ``RankGroup``."""
        array = latents.carrier()

        async def answer(rank: int) -> RankPixels:
            answered = await self._on(rank, self._workers[rank].decode, task, array, latents.dtype)
            if isinstance(answered, RankFailure):
                logger.warning("rank %d failed: %s%s", rank, answered.message, answered.trace)
                raise answered.error(rank)
            return replace(answered, timings_ms={**answered.timings_ms, "put": 0.0})

        async def abort() -> Sequence[int]:
            if len(ranks) > 1:
                for rank in ranks:
                    self._workers[rank].abort()
            return ()

        return await settle(
            {rank: answer(rank) for rank in ranks},
            limit_s=self._config.run_limit_s(measure=task.measure),
            grace_s=self._config.group.abort_grace_s,
            abort=abort,
        )

    async def recover(self, error: RankError) -> None:
        """Join the ranks anew, with new threads and decoders where one is stuck; see ``RankGroup``."""
        if error.needs_new_processes:
            await self.close()
            for warning in (await self.start()).warnings:
                logger.warning("after the group was started anew: %s", warning)
        else:
            self._join()

    async def set_compile(self, enabled: bool, reason: str) -> None:
        """Switch compilation off on all ranks; see ``RankGroup``."""
        self._compile = enabled
        if not enabled:
            for rank, worker in enumerate(self._workers):
                await self._on(rank, worker.disable_compile, reason)

    async def use_compiled(self, keys: frozenset[str]) -> None:
        """Tell all ranks what runs compiled; see ``RankGroup``."""
        for rank, worker in enumerate(self._workers):
            await self._on(rank, worker.use_compiled, keys)

    async def close(self) -> None:
        """End the ranks; see ``RankGroup``."""
        for worker in self._workers:
            worker.close()
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)
        self._workers, self._threads = [], []

    def _join(self) -> None:
        for worker, communicator in zip(self._workers, ThreadCommunicator.create(self.size), strict=True):
            worker.attach(communicator)

    async def _on(self, rank: int, call: Callable[..., T], *arguments: object) -> T:
        """``call`` in the thread of ``rank``.

        Raises:
            RankError: with what it raised.
        """
        failure: RankFailure | None = None
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads[rank], call, *arguments)
        except Exception as error:
            failure = describe_failure(error)
        raise failure.error(rank)
