"""Jobs that one rank carries out together: who joins whom, in which order, and how long one waits for others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from decode_service.engine.scheduler import Scheduler, Together
from decode_service.errors import DeadlineExceededError
from decode_service.planning.load import Load

from .scheduled_jobs import Jobs, run, settle


class Passes(Jobs):
    """Jobs that can be carried out together where the letter of their name is the same."""

    def __init__(self, scheduler: Scheduler, *, most: int = 3, window_s: float = 0.0) -> None:
        super().__init__()
        self.scheduler, self.most, self.window_s = scheduler, most, window_s
        self.error: Exception | None = None

    def add(self, name: str, caller: str = "", gang: Any = False, **options: Any) -> asyncio.Task[str]:
        async def work(members: Sequence[str], ranks: Sequence[int]) -> list[str]:
            await self.job("+".join(members))(ranks)
            if self.error is not None:
                raise self.error
            return list(members)

        how = Together(name[0], self.most, name, work, self.window_s)
        run = self.scheduler.run(self.job(name), gang=gang, caller=caller, together=how, **options)
        return asyncio.create_task(run)


def test_what_is_alike_joins_the_one_whose_turn_it_is() -> None:
    async def test(_: Jobs) -> None:
        passes = Passes(Scheduler(1, max_jobs=20))
        names = ["a0", "a1", "a2", "a3", "a4", "b1"]
        tasks = [passes.add(name) for name in names]
        await settle()
        assert passes.started == ["a0"], "whoever finds a rank idle starts at once"
        passes.finish("a0")
        await settle()
        assert passes.started == ["a0", "a1+a2+a3"]
        assert passes.scheduler.running == 3 and passes.scheduler.waiting == 2
        passes.finish("a1+a2+a3")
        await settle()
        assert passes.started[2:] == ["a4"], "nothing else is alike"
        passes.finish("a4")
        await settle()
        passes.finish("b1")
        assert await asyncio.gather(*tasks) == names
        assert passes.scheduler.idle_ranks == 1 and passes.scheduler.running == 0

    run(test)


def test_joining_keeps_the_order_of_a_caller_and_takes_one_of_each_first() -> None:
    async def test(_: Jobs) -> None:
        passes = Passes(Scheduler(1, max_jobs=20))
        tasks = [passes.add("x")]
        tasks += [passes.add(name, "ann") for name in ("a1", "a2", "b1", "a3")]
        tasks += [passes.add(name, "bob") for name in ("a4", "a5")]
        tasks += [passes.add(name, "cid") for name in ("b2", "a6")]
        await settle()
        passes.finish("x")
        await settle()
        # Bob's first before Ann's second; never a6, which stands behind b2.
        assert passes.started == ["x", "a1+a4+a2"]
        passes.finish("a1+a4+a2")
        await settle()
        # Bob's turn was not used up by what joined.
        assert passes.started[-1] == "a5"
        passes.finish("a5")
        await settle()
        assert passes.started[-1] == "b2+b1", "Cid's turn, and Ann's next is alike"
        passes.finish("b2+b1")
        await settle()
        assert passes.started[-1] == "a3+a6"
        passes.finish("a3+a6")
        await asyncio.gather(*tasks)

    run(test)


def test_another_caller_waits_for_one_pass_and_no_longer() -> None:
    async def test(_: Jobs) -> None:
        passes = Passes(Scheduler(1, max_jobs=40))
        flood = [passes.add(f"a{index}", "flood") for index in range(20)]
        await settle()
        other = passes.add("z", "other")
        await settle()
        passes.finish("a0")
        await settle()
        # The flood was there first, so that the next turn is its own.
        assert passes.started == ["a0", "a1+a2+a3"]
        passes.finish("a1+a2+a3")
        await settle()
        assert passes.started[-1] == "z"
        for task in flood:
            task.cancel()
        passes.finish("z")
        assert await other == "z"

    run(test)


def test_idle_ranks_share_what_is_alike_and_gang_jobs_join_nothing() -> None:
    async def test(_: Jobs) -> None:
        passes = Passes(Scheduler(2, max_jobs=20), most=8)
        tasks = [passes.add("x", gang=True)]
        tasks += [passes.add(f"a{index}") for index in range(5)]
        await settle()
        passes.finish("x")
        await settle()
        assert passes.started == ["x", "a0+a1+a2", "a3+a4"]
        tasks += [passes.add("a5", gang=True), passes.add("a6")]
        passes.finish("a0+a1+a2", "a3+a4")
        await settle()
        assert passes.started[-1] == "a5"
        passes.finish("a5")
        await settle()
        passes.finish("a6")
        await asyncio.gather(*tasks)

    run(test)


def test_a_job_that_load_would_share_is_asked_before_it_joins() -> None:
    async def test(_: Jobs) -> None:
        passes = Passes(Scheduler(1, max_jobs=20))
        asked: list[str] = []

        def shares(name: str, answer: bool) -> Callable[[Load], bool]:
            def gang(load: Load) -> bool:
                asked.append(name)
                return answer

            return gang

        tasks = [passes.add("x"), passes.add("a1"), passes.add("a2", gang=shares("a2", False))]
        tasks += [passes.add("a3", gang=shares("a3", True))]
        await settle()
        passes.finish("x")
        await settle()
        assert passes.started == ["x", "a1+a2"] and asked[:2] == ["a2", "a3"]
        passes.finish("a1+a2")
        await settle()
        passes.finish("a3")
        await asyncio.gather(*tasks)

    run(test)


def test_a_pass_that_fails_fails_all_and_leaves_the_ranks_free() -> None:
    async def test(_: Jobs) -> None:
        passes = Passes(Scheduler(1, max_jobs=20))
        tasks = [passes.add(name) for name in ("x", "a1", "a2", "a3")]
        await settle()
        passes.finish("x")
        await settle()
        # Of one nobody waits for any more.
        tasks[2].cancel()
        passes.error = ValueError("broken")
        passes.finish("a1+a2+a3")
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert results[0] == "x" and isinstance(results[2], asyncio.CancelledError)
        assert all(isinstance(results[index], ValueError) for index in (1, 3))
        assert passes.scheduler.idle_ranks == 1 and passes.scheduler.running == 0

    run(test)


def test_what_is_cancelled_while_it_waits_does_not_join() -> None:
    async def test(_: Jobs) -> None:
        passes = Passes(Scheduler(1, max_jobs=20))
        tasks = [passes.add(name) for name in ("x", "a1", "a2")]
        late = passes.add("a3", deadline=time.monotonic() + 0.05)
        await settle()
        tasks[2].cancel()
        with pytest.raises(DeadlineExceededError, match="while waiting"):
            await late
        passes.finish("x")
        await settle()
        assert passes.started == ["x", "a1"]
        passes.finish("a1")
        assert await tasks[1] == "a1"

    run(test)


def test_a_window_waits_for_others_and_no_longer_than_it_says() -> None:
    async def test(_: Jobs) -> None:
        passes = Passes(Scheduler(1, max_jobs=20), most=2, window_s=0.2)
        begun = time.monotonic()
        tasks = [passes.add("a1")]
        await settle()
        assert passes.started == []
        tasks.append(passes.add("a2"))
        await settle()
        assert passes.started == ["a1+a2"] and time.monotonic() - begun < 0.15, "the pass is full"
        passes.finish("a1+a2")
        await asyncio.gather(*tasks)
        begun = time.monotonic()
        last = passes.add("a3")
        while not passes.started[1:]:
            await asyncio.sleep(0.01)
        assert passes.started[1] == "a3" and time.monotonic() - begun > 0.15
        passes.finish("a3")
        assert await last == "a3"

    run(test)


def test_what_was_left_to_other_ranks_waits_for_no_second_window() -> None:
    async def test(_: Jobs) -> None:
        passes = Passes(Scheduler(2, max_jobs=20), most=2, window_s=60.0)
        tasks = [passes.add("a1"), passes.add("a2")]
        await settle()
        # The pass is full, and its second member has a rank of its own, which it does not leave idle for another minute.
        assert passes.started == ["a1", "a2"]
        passes.finish("a1", "a2")
        await asyncio.gather(*tasks)
        later = passes.add("a3")
        await settle()
        assert passes.started[2:] == [], "who comes later has a window like everybody"
        later.cancel()

    run(test)


def test_one_window_is_enough_for_all_that_came_in_it() -> None:
    async def test(_: Jobs) -> None:
        passes = Passes(Scheduler(2, max_jobs=20), most=8, window_s=0.5)
        tasks = [passes.add("a1")]
        await asyncio.sleep(0.05)
        tasks += [passes.add(name) for name in ("a2", "a3", "a4")]
        while not passes.started:
            await asyncio.sleep(0.005)
        await settle()
        assert passes.started == ["a1+a2", "a3+a4"]
        passes.finish("a1+a2", "a3+a4")
        await asyncio.gather(*tasks)

    run(test)


def test_a_window_takes_one_timer_however_many_come_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(_: Jobs) -> None:
        loop = asyncio.get_running_loop()
        call_at, timers = loop.call_at, []

        def noted(*args: Any, **kwargs: Any) -> asyncio.TimerHandle:
            timers.append(call_at(*args, **kwargs))
            return timers[-1]

        # call_later goes by it too.
        monkeypatch.setattr(loop, "call_at", noted)
        passes = Passes(Scheduler(1, max_jobs=100), most=64, window_s=60.0)
        tasks = [passes.add(f"a{index}", "ann") for index in range(30)]
        await settle()
        assert len(timers) == 1
        tasks[0].cancel()
        await settle()
        assert len([timer for timer in timers if not timer.cancelled()]) == 1, "the next one's window instead"
        assert passes.started == []
        for task in tasks:
            task.cancel()

    run(test)


def test_a_scheduler_that_drains_waits_for_no_window() -> None:
    async def test(_: Jobs) -> None:
        passes = Passes(Scheduler(1, max_jobs=20), window_s=60.0)
        tasks = [passes.add("a1"), passes.add("a2")]
        await settle()
        drained = asyncio.create_task(passes.scheduler.drain())
        await settle()
        assert passes.started == ["a1+a2"] and not drained.done()
        passes.finish("a1+a2")
        await asyncio.gather(*tasks, drained)

    run(test)


def test_retries_are_carried_out_alone() -> None:
    async def test(_: Jobs) -> None:
        passes = Passes(Scheduler(1, max_jobs=20))
        tasks = [passes.add("x"), passes.add("a1"), passes.add("a2", admitted=True)]
        await settle()
        passes.finish("x")
        await settle()
        assert passes.started == ["x", "a2"]
        passes.finish("a2")
        await settle()
        passes.finish("a1")
        await asyncio.gather(*tasks)

    run(test)
