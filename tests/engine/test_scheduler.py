"""Who decodes when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import pytest

from decode_service.engine.scheduler import Scheduler
from decode_service.errors import DeadlineExceededError, QueueFullError


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


def test_small_jobs_run_one_per_rank_at_the_same_time() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(3, max_jobs=10)
        tasks = [asyncio.create_task(scheduler.run(jobs.job(name), gang=False)) for name in "abcd"]
        await settle()
        assert jobs.started == ["a", "b", "c"]
        assert jobs.ranks == {"a": [0], "b": [1], "c": [2]}
        jobs.finish("b")
        await settle()
        assert jobs.ranks["d"] == [1]
        jobs.finish(*"acd")
        assert await asyncio.gather(*tasks) == list("abcd")
        assert scheduler.idle_ranks == 3

    run(test)


def test_a_gang_job_takes_all_ranks_and_is_not_overtaken() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(2, max_jobs=10)
        tasks = [
            asyncio.create_task(scheduler.run(jobs.job(name), gang=name == "gang"))
            for name in ("small", "gang", "later")
        ]
        await settle()
        # One rank is idle, but a small job that took it would keep the gang waiting for as long as small jobs come.
        assert jobs.started == ["small"]
        jobs.finish("small")
        await settle()
        assert jobs.started == ["small", "gang"]
        assert jobs.ranks["gang"] == [0, 1]
        jobs.finish("gang", "later")
        await asyncio.gather(*tasks)
        assert jobs.started == ["small", "gang", "later"]

    run(test)


def test_the_queue_is_bounded_and_says_so() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(1, max_jobs=2)
        tasks = [asyncio.create_task(scheduler.run(jobs.job(name), gang=False)) for name in "ab"]
        await settle()
        with pytest.raises(QueueFullError, match="the limit is 2"):
            await scheduler.run(jobs.job("c"), gang=False)
        assert "c" not in jobs.started
        jobs.finish("a", "b")
        await asyncio.gather(*tasks)
        jobs.job("d")
        again = asyncio.create_task(scheduler.run(jobs.job("d"), gang=True))
        await settle()
        jobs.finish("d")
        assert await again == "d"

    run(test)


def test_a_cancelled_waiter_leaves_the_queue_at_once() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(1, max_jobs=2)
        first = asyncio.create_task(scheduler.run(jobs.job("first"), gang=False))
        waiter = asyncio.create_task(scheduler.run(jobs.job("waiter"), gang=True))
        await settle()
        waiter.cancel()
        await settle()
        assert scheduler.waiting == 0
        jobs.finish("first")
        assert await first == "first"
        assert jobs.started == ["first"]

    run(test)


def test_a_cancelled_gang_at_the_head_lets_the_next_start() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(2, max_jobs=5)
        small = asyncio.create_task(scheduler.run(jobs.job("small"), gang=False))
        gang = asyncio.create_task(scheduler.run(jobs.job("gang"), gang=True))
        later = asyncio.create_task(scheduler.run(jobs.job("later"), gang=False))
        await settle()
        assert jobs.started == ["small"]
        gang.cancel()
        await settle()
        assert jobs.started == ["small", "later"]
        jobs.finish("small", "later")
        await asyncio.gather(small, later)

    run(test)


def test_cancelling_the_caller_never_interrupts_a_running_job() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(2, max_jobs=5)
        caller = asyncio.create_task(scheduler.run(jobs.job("collective"), gang=True))
        following = asyncio.create_task(scheduler.run(jobs.job("following"), gang=False))
        await settle()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await settle()
        # Its ranks are still inside the collective, so nobody else may have them.
        assert (scheduler.running, scheduler.idle_ranks, jobs.started) == (1, 0, ["collective"])
        jobs.finish("collective", "following")
        assert await following == "following"

    run(test)


@pytest.mark.parametrize("waits", [True, False])
def test_a_deadline_ends_the_waiting(waits: bool) -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(1, max_jobs=5)
        first = asyncio.create_task(scheduler.run(jobs.job("first"), gang=False)) if waits else None
        await settle()
        where = "waiting for the ranks" if waits else "while decoding"
        with pytest.raises(DeadlineExceededError, match=where):
            await scheduler.run(jobs.job("late"), gang=True, deadline=time.monotonic() + 0.05)
        assert scheduler.waiting == 0
        assert scheduler.running == 1
        jobs.finish("first" if waits else "late")
        if first:
            await first
        await scheduler.drain()
        assert scheduler.idle_ranks == 1

    run(test)


def test_a_job_whose_deadline_has_passed_is_not_started() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(1, max_jobs=5)
        with pytest.raises(DeadlineExceededError):
            await scheduler.run(jobs.job("late"), gang=False, deadline=time.monotonic() - 1)
        await settle()
        assert jobs.started == []

    run(test)


def test_exclusive_work_goes_first_and_alone() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(2, max_jobs=5)
        tasks = [asyncio.create_task(scheduler.run(jobs.job(name), gang=False)) for name in "abc"]
        await settle()
        alone = jobs.job("exclusive")
        done = scheduler.exclusive(lambda: alone([]))
        await settle()
        assert jobs.started == ["a", "b"]
        jobs.finish("a")
        await settle()
        assert jobs.started == ["a", "b"]
        jobs.finish("b")
        await settle()
        assert jobs.started == ["a", "b", "exclusive"]
        jobs.finish("exclusive", "c")
        assert await done == "exclusive"
        await asyncio.gather(*tasks)

    run(test)


def test_a_retry_goes_to_the_head_and_is_always_admitted() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(1, max_jobs=2)
        tasks = [asyncio.create_task(scheduler.run(jobs.job(name), gang=False)) for name in ("running", "waiting")]
        await settle()
        tasks.append(asyncio.create_task(scheduler.run(jobs.job("retry"), gang=False, admitted=True)))
        await settle()
        jobs.finish("running", "waiting", "retry")
        await asyncio.gather(*tasks)
        assert jobs.started == ["running", "retry", "waiting"]

    run(test)


def test_a_failed_job_releases_its_ranks() -> None:
    async def test(jobs: Jobs) -> None:
        scheduler = Scheduler(2, max_jobs=5)

        async def fail(ranks: Sequence[int]) -> None:
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            await scheduler.run(fail, gang=True)
        assert scheduler.idle_ranks == 2

    run(test)
